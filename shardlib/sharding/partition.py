"""The placement of every leaf of a training state, and the reason for it."""

import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from shardlib.errors import RuleError
from shardlib.functional import AxesByPath, axis_names_of
from shardlib.mesh import entry_axes, mesh_sizes
from shardlib.paths import matches, named_leaves, nearest_pattern, path_string
from shardlib.rules import AxisRules, Choice, Resolution
from shardlib.rules.resolve import STAGE
from shardlib.sharding.constrain import Scope, active_or, manual_axes

Section = Literal["params", "model_state", "opt_state"]

_LOG = logging.getLogger(__name__)
_UNNAMED = "model state without names"
OVERRIDES = ", in place of metadata "
"""Text in `Placement.origin` between a path pattern and the metadata that it overrides."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of one leaf.

    `origin` is the source of its logical axes: the path pattern that matched, with any metadata
    that it overrides, `"metadata"`, `"auto"`, or the parameter that an optimizer leaf belongs to.
    `asked_for` is false if the rules would have sharded the leaf further but could not.
    `memory_kind` is None for device memory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    logical_axes: tuple[str | None, ...] | None
    origin: str
    resolution: Resolution
    note: str = ""
    asked_for: bool = True
    memory_kind: str | None = None

    @property
    def spec(self) -> PartitionSpec:
        return self.resolution.spec

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Returns the number of different pieces of the leaf."""
        names = [n for c in self.resolution.choices for n in c.mesh_axes]
        return math.prod(sizes[name] for name in names)

    @property
    def moved_stage(self) -> bool:
        """Whether `stage` shards another dim than the layers, whose number it does not divide."""
        return any(choice.moved_to is not None for choice in self.resolution.choices)

    @property
    def has_stages(self) -> bool:
        """Whether the first dim counts layers that are divided over pipeline stages."""
        return self.moved_stage or bool(self.spec and STAGE in entry_axes(self.spec[0]))

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole leaf; typed PRNG keys count as their key data."""
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            key = jax.ShapeDtypeStruct(self.shape, self.dtype)
            data = jax.eval_shape(jax.random.key_data, key)
            return data.size * data.dtype.itemsize
        return math.prod(self.shape) * self.dtype.itemsize


def place(
    tree: PyTree, axes: AxesByPath, rules: AxisRules, mesh: Mesh | AbstractMesh
) -> dict[str, Placement]:
    """Places every leaf of a tree of parameters or model state.

    The logical axes of a leaf come from the first path pattern of the rules that matches. Without a
    match they come from `axes`, and without an entry there `rules.auto` places the leaf. Patterns
    come first because the user who trains the model wrote them. Axes are logical, by path, or
    `None`, as `functional` finds them in Flax metadata. The table for parameters applies.

    Raises:
        RuleError: If leaves cannot be placed; the message lists all of them.
    """
    rules.check(mesh)
    sizes = mesh_sizes(mesh)
    placements = {
        path: _place_leaf(path, leaf, axes.get(path), rules, sizes)
        for path, leaf in named_leaves(tree).items()
    }
    _raise_faults(placements.values())
    return placements


def place_model_state(
    tree: PyTree,
    axes: AxesByPath,
    rules: AxisRules,
    mesh: Mesh | AbstractMesh,
    frozen: Collection[str] = (),
) -> dict[str, Placement]:
    """Places model state: leaves without names (statistics, counters) are small and are replicated.

    The arguments and errors are as in `place`. `frozen` holds the paths of untrained parameters,
    which are placed like trained ones. Path patterns and `auto` do not apply to other leaves
    without names.
    """
    leaves = named_leaves(tree)
    placed = {p: x for p, x in leaves.items() if p in frozen or axes.get(p) is not None}
    placements = place(placed, axes, rules, mesh)
    for path in frozen:
        note = "; ".join(filter(None, ("not trained", placements[path].note)))
        placements[path] = dataclasses.replace(placements[path], note=note)
    return {
        path: placements.get(path) or _unnamed_state(path, leaf) for path, leaf in leaves.items()
    }


def unmatched_patterns(rules: AxisRules, placements: Iterable[Placement]) -> dict[str, str]:
    """Returns the path patterns of the rules that match no leaf, with the nearest one that does."""
    return _unmatched(rules, [p.path for p in placements if p.origin != _UNNAMED])


def _unmatched(rules: AxisRules, paths: Sequence[str]) -> dict[str, str]:
    return {
        pattern: nearest_pattern(pattern, paths)
        for pattern, _ in rules.paths
        if not any(matches(pattern, path) for path in paths)
    }


def warn_of_unmatched(rules: AxisRules, placements: Iterable[Placement], model: str) -> None:
    """Logs the path patterns that match no leaf.

    They are not refused: a table of rules may serve several models.
    """
    warn_of_unmatched_paths(rules, [p.path for p in placements if p.origin != _UNNAMED], model)


def warn_of_unmatched_paths(rules: AxisRules, paths: Sequence[str], model: str) -> None:
    """Logs the path patterns that match no path."""
    for pattern, hint in _unmatched(rules, paths).items():
        _LOG.warning("the path rule %r matches no parameter of %s.%s", pattern, model, hint)


def _unnamed_state(path: str, leaf: jax.Array) -> Placement:
    rank = len(leaf.shape)
    choices = tuple(Choice(dim, None, None, ()) for dim in range(rank))
    resolution = Resolution(PartitionSpec(*[None] * rank), choices)
    return Placement(path, tuple(leaf.shape), leaf.dtype, None, _UNNAMED, resolution)


def _raise_faults(placements: Iterable[Placement]) -> None:
    """Raises all faults at once, grouped by remedy."""
    by_fix: dict[str, list[str]] = {}
    for placement in placements:
        for fault in dict.fromkeys(placement.resolution.faults):
            what, _, fix = fault.partition("\n")
            by_fix.setdefault(fix, []).append(f"{placement.path}: {what}")
    if by_fix:
        raise RuleError(
            "\n".join("\n".join([*whats, fix] if fix else whats) for fix, whats in by_fix.items())
        )


def _place_leaf(
    path: str,
    leaf: jax.Array,
    logical: tuple[str | None, ...] | None,
    rules: AxisRules,
    sizes: Mapping[str, int],
) -> Placement:
    shape = tuple(leaf.shape)

    def placed(axes: Sequence[str | None], origin: str) -> Placement:
        resolution = rules.resolve(axes, shape, sizes)
        asked_for = not any(choice.refused for choice in resolution.choices)
        axes, note = tuple(axes), _resolution_note(resolution, shape)
        return Placement(path, shape, leaf.dtype, axes, origin, resolution, note, asked_for)

    for pattern, axes in rules.paths:
        if matches(pattern, path):
            named = axes or (None,) * len(shape)
            overridden = f"{OVERRIDES}{logical}" if logical not in (None, named) else ""
            return placed(named, f"path {pattern}{overridden}")
    if logical is not None:
        placement = placed(logical, "metadata")
        return placement if len(logical) == len(shape) else _with_path_rule(placement)
    return _auto(path, shape, leaf.dtype, rules, sizes)


def _with_path_rule(placement: Placement) -> Placement:
    """Adds to the refusal of metadata of another rank that a path rule takes their place."""
    fix = f' Or add a path rule: rules.override(paths={{"...": {_example(placement.shape)}}}).'
    faults = tuple(fault + fix for fault in placement.resolution.faults)
    return dataclasses.replace(placement, resolution=placement.resolution._replace(faults=faults))


def _resolution_note(resolution: Resolution, shape: tuple[int, ...]) -> str:
    """Returns a note on the names without a rule, which are taken as mesh axes, and on layers that
    `stage` does not divide."""
    names = [c.logical_axis for c in resolution.choices if c.logical_axis and c.rule is None]
    notes = [f"taken as mesh axes: {', '.join(names)}"] if names else []
    notes += [
        f"stage shards dim {c.moved_to}: it does not divide {shape[c.dim]} {c.logical_axis}"
        for c in resolution.choices
        if c.moved_to is not None
    ]
    return "; ".join(notes)


def _auto(
    path: str, shape: tuple[int, ...], dtype: np.dtype, rules: AxisRules, sizes: Mapping[str, int]
) -> Placement:
    def placed(resolution: Resolution, note: str = "", asked_for: bool = True) -> Placement:
        return Placement(path, shape, dtype, None, "auto", resolution, note, asked_for)

    auto = rules.auto
    fix = f'  Annotate it, or add a path rule: rules.override(paths={{"...": {_example(shape)}}}).'
    if auto is None:
        fault = f"shape {shape} has no logical axes, no path rule matches, and auto is off.\n{fix}"
        return placed(Resolution(PartitionSpec(), (), (fault,)))
    replicated = Resolution(PartitionSpec(*[None] * len(shape)), ())
    size = sizes.get(auto.mesh_axis, 1) if auto.mesh_axis else 1
    if auto.mesh_axis is None:
        return placed(replicated, "the rules replicate parameters")
    if math.prod(shape) < auto.min_elements:
        return placed(replicated, f"smaller than {auto.min_elements} elements")
    if size == 1:
        return placed(replicated, f"{auto.mesh_axis} has size 1 in this mesh", asked_for=False)
    fitting = [dim for dim, n in enumerate(shape) if n % size == 0]
    if not fitting:
        return placed(replicated, f"{auto.mesh_axis}={size} divides none of its dims", False)
    best = max(fitting, key=lambda dim: shape[dim])
    axes = tuple("auto" if dim == best else None for dim in range(len(shape)))
    return placed(
        _auto_rules(auto.mesh_axis).resolve(axes, shape, sizes), "largest dim that divides"
    )


def _auto_rules(mesh_axis: str) -> AxisRules:
    return AxisRules(params={"auto": mesh_axis}, activations={})


def _example(shape: tuple[int, ...]) -> tuple[None, ...]:
    return (None,) * len(shape)


def place_optimizer(opt_state: PyTree, params: Mapping[str, Placement]) -> dict[str, Placement]:
    """Places optimizer state by its parameters, whatever the optax chain.

    A leaf belongs to the parameter whose path ends the leaf's own path. It takes the parameter's
    placement if the shapes are equal. A factored statistic, which lacks one of the parameter's dims
    (Shazeer & Stern 2018, "Adafactor"), takes the placement of the remaining dims. All other leaves
    are replicated, as counters and placeholders should be. A larger leaf of neither kind has
    `asked_for` false, so that `explain` reports it.
    """
    by_keys = {tuple(path.split("/")): placement for path, placement in params.items()}
    leaves, _ = jax.tree_util.tree_flatten_with_path(opt_state)
    placements = {}
    for key_path, leaf in leaves:
        keys = tuple(path_string(key_path).split("/"))
        owner = next((by_keys[keys[i:]] for i in range(len(keys)) if keys[i:] in by_keys), None)
        path = path_string(key_path)
        placements[path] = _place_statistic(path, leaf, owner)
    return placements


def _place_statistic(path: str, leaf: jax.Array, owner: Placement | None) -> Placement:
    shape = tuple(leaf.shape)
    kept: tuple[int, ...] | None = None
    if owner is not None and shape == owner.shape:
        kept = tuple(range(len(shape)))
    elif owner is not None:
        rank = len(owner.shape)
        candidates = [tuple(d for d in range(rank) if d != gone) for gone in range(rank)]
        kept = next((c for c in candidates if tuple(owner.shape[d] for d in c) == shape), None)
    if owner is None or kept is None:
        resolution = Resolution(PartitionSpec(*[None] * len(shape)), ())
        origin = f"of {owner.path}" if owner else "no parameter"
        note, is_small = "not a parameter's shape", math.prod(shape) <= 1
        return Placement(path, shape, leaf.dtype, None, origin, resolution, note, is_small)
    chosen = {c.dim: c for c in owner.resolution.choices}
    spec = PartitionSpec(*[owner.spec[d] if d < len(owner.spec) else None for d in kept])
    choices = tuple(
        chosen[d]._replace(dim=i, moved_to=None) for i, d in enumerate(kept) if d in chosen
    )
    axes = owner.logical_axes and tuple(owner.logical_axes[d] for d in kept)
    return Placement(path, shape, leaf.dtype, axes, f"of {owner.path}", Resolution(spec, choices))


def pin(tree: PyTree, placements: Mapping[str, Placement], scope: Scope) -> PyTree:
    """Returns traced arrays constrained to their placements.

    Mesh axes that are manual in the region being traced are left out: a leaf is the part in one of
    their shards.
    """
    gone, mesh = manual_axes(), scope.mesh_here

    def pinned(path: KeyPath, x: jax.Array) -> jax.Array:
        spec = _without(placements[path_string(path)].spec, gone)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # type: ignore[arg-type]

    return jax.tree_util.tree_map_with_path(pinned, tree)


def _without(spec: PartitionSpec, gone: Sequence[str]) -> PartitionSpec:
    kept = [tuple(name for name in entry_axes(entry) if name not in gone) for entry in spec]
    return PartitionSpec(*[names or None for names in kept])


def shardings(
    tree: PyTree, placements: Mapping[str, Placement], mesh: Mesh | AbstractMesh
) -> PyTree:
    """Returns a tree of `NamedSharding`s, one for each leaf, from placements by path."""

    def sharding(path: KeyPath, _: Any) -> NamedSharding:
        placement = placements[path_string(path)]
        return NamedSharding(mesh, placement.spec, memory_kind=placement.memory_kind)

    return jax.tree_util.tree_map_with_path(sharding, tree)


def shard(model: PyTree, mesh: Mesh | None = None, rules: AxisRules | None = None) -> Any:
    """Places a model that is already in memory.

    Parameters go where `init_state` would place them. Model state without axis names (batch
    statistics) is replicated, as there. The state of random number generators is unchanged.

    Args:
        model: An NNX module, which is updated in place and returned; or a tree of arrays, such as
            the variables of a linen module (boxed or not) or loaded weights by path.
        mesh: The mesh; the active one by default.
        rules: The rules; the active ones by default.

    Raises:
        RuleError: If leaves cannot be placed; in this case no leaf has been moved.
    """
    scope = active_or(mesh, rules)
    if isinstance(model, nnx.Module):
        state = nnx.state(model, nnx.Not(nnx.RngState))
        nnx.update(model, _put(state, scope))
        return model
    return _put(model, scope)


def _put(tree: PyTree, scope: Scope) -> PyTree:
    leaves = weights_by_path(tree)
    params = {leaf.path for leaf in leaves if leaf.is_param}
    axes = {leaf.path: leaf.axes for leaf in leaves}
    flat = {leaf.path: leaf.value for leaf in leaves}
    placements = place_model_state(flat, axes, scope.rules, scope.mesh, frozen=params)
    warn_of_unmatched(scope.rules, placements.values(), "the model")
    placed = jax.device_put(
        [leaf.value for leaf in leaves],
        [NamedSharding(scope.mesh, placements[leaf.path].spec) for leaf in leaves],
    )
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


class Weight(NamedTuple):
    """A leaf of a tree of given or loaded weights."""

    path: str
    """Its path as in a state: without the name of a linen collection of parameters."""
    value: object
    axes: tuple[str | None, ...] | None
    is_param: bool


def weights_by_path(tree: PyTree) -> list[Weight]:
    """Returns the leaves of an `nnx.State`, of linen variables (boxed or not) or of any other tree
    of arrays, in tree order."""
    is_mapping = isinstance(tree, Mapping) and not isinstance(tree, nnx.State)
    collections = is_mapping and isinstance(tree.get("params"), Mapping)
    weights = []
    for path, box in named_leaves(tree, is_leaf=_names_axes).items():
        is_param = isinstance(box, nnx.Param) or not isinstance(box, nnx.Variable)
        if collections:
            is_param = path.startswith("params/")
            path = path.removeprefix("params/")
        for inner, leaf in named_leaves(_value(box)).items():
            axes = axis_names_of(_axis_names(box), np.ndim(leaf))
            weights.append(Weight(f"{path}/{inner}" if inner else path, leaf, axes, is_param))
    return weights


def _names_axes(node: object) -> bool:
    return isinstance(node, nnx.Variable) or (hasattr(node, "names") and hasattr(node, "unbox"))


def _value(box: Any) -> PyTree:
    if isinstance(box, nnx.Variable):
        return box.get_value()
    return box.value if _names_axes(box) else box


def _axis_names(box: object) -> Any:
    if isinstance(box, nnx.Variable):
        return box.get_metadata().get("out_sharding")
    names = getattr(box, "names", None)
    return None if names is None else PartitionSpec(*names)
