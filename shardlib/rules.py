"""Rules that map logical axes to mesh axes, and their resolution for one tensor.

A table of rules is an ordered mapping from a logical axis to one of

* a mesh axis, `"fsdp"`;
* several mesh axes, `("data", "fsdp")` or `"data+fsdp"`: their product;
* `None`: replicated on purpose;
* a list of such alternatives, tried in order.

Resolution takes the logical axes of a tensor in the order of the table. An alternative is refused
when one of its mesh axes already shards another dim of the tensor, or when their product does not
divide the dim; the first that fits wins. A standard mesh axis that the mesh does not have counts as
an axis of size 1, which shards nothing. When every alternative is refused the tensor cannot be
placed as asked, and that is an error, never a silent replication.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jax.sharding import PartitionSpec

from shardlib.errors import RuleError, did_you_mean
from shardlib.mesh import STANDARD_AXES, mesh_sizes

Alternative = tuple[str, ...]
Table = tuple[tuple[str, tuple[Alternative, ...]], ...]
LogicalAxes = tuple[str | None, ...]
Kind = Literal["params", "activations"]

ANY = "*"
"""The key of a rule for every logical axis that its table does not name."""


class Refusal(NamedTuple):
    """An alternative that was not taken, and why."""

    alternative: Alternative
    cause: Literal["used", "size_one", "indivisible"]
    reason: str


class Choice(NamedTuple):
    """What one dim of a tensor was given.

    `rule` is the key of the table that decided, or `None` for a dim without a logical axis.
    """

    dim: int
    logical_axis: str | None
    rule: str | None
    mesh_axes: Alternative
    refused: tuple[Refusal, ...] = ()

    @property
    def fell_back(self) -> bool:
        """Whether the dim is less sharded than asked for because its size did not divide."""
        return any(r.cause == "indivisible" for r in self.refused)


class Resolution(NamedTuple):
    """How the rules place one tensor: `spec` is meaningful when there are no `faults`."""

    spec: PartitionSpec
    choices: tuple[Choice, ...]
    faults: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Auto:
    """How a parameter without logical axes is placed.

    The largest dim that `mesh_axis` divides is sharded over it, when the parameter has at least
    `min_elements` elements; smaller ones are replicated. `mesh_axis=None` replicates all of them.
    """

    mesh_axis: str | None = "fsdp"
    min_elements: int = 2**14


def _alternative(value: Any, where: str) -> Alternative:
    if value is None:
        return ()
    names = value.split("+") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(n, str) and n for n in names):
        raise RuleError(
            f"{where} is {value!r}, which is not a mesh axis.\n"
            "  Give a name ('fsdp'), a product ('data+fsdp'), None, or a list of these."
        )
    names = tuple(name.strip() for name in names)
    if len(set(names)) != len(names):
        raise RuleError(f"{where} is {value!r}, which names a mesh axis twice.\n  Name it once.")
    return names


def _table(rules: Mapping[str, Any] | Table, kind: Kind) -> Table:
    items = rules.items() if isinstance(rules, Mapping) else rules
    table = []
    for axis, value in items:
        where = f"the rule for {axis!r} ({kind})"
        is_list = isinstance(value, list) or (
            isinstance(value, tuple) and any(not isinstance(v, str) for v in value)
        )
        if is_list and not value:
            raise RuleError(f"{where} has no alternatives.\n  Use None to replicate.")
        alternatives = value if is_list else [value]
        table.append((axis, tuple(_alternative(a, where) for a in alternatives)))
    return tuple(table)


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Where every parameter and activation lives, by the names of its logical axes.

    Args:
        params: Rules for parameters, and so for gradients and optimizer state.
        activations: Rules for activations and for the batch.
        paths: Logical axes of parameters that carry none of their own, by a pattern over their
            path (`*` stays within a segment, `**` crosses segments); the first match wins. An empty
            tuple of axes replicates.
        auto: What happens to a parameter that has no logical axes and matches no path. `None` makes
            such a parameter an error.

    Raises:
        RuleError: If a rule is not of a form that the module describes.
    """

    params: Any
    activations: Any
    paths: Any = ()
    auto: Auto | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", _table(self.params, "params"))
        object.__setattr__(self, "activations", _table(self.activations, "activations"))
        paths = self.paths.items() if isinstance(self.paths, Mapping) else self.paths
        object.__setattr__(self, "paths", tuple((p, tuple(axes)) for p, axes in paths))
        object.__setattr__(
            self, "_hash", hash((self.params, self.activations, self.paths, self.auto))
        )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def table(self, kind: Kind) -> Table:
        """Returns one table in its normal form."""
        return self.params if kind == "params" else self.activations

    def override(
        self,
        params: Mapping[str, Any] | None = None,
        activations: Mapping[str, Any] | None = None,
        paths: Mapping[str, Iterable[str | None]] | None = None,
        **param_rules: Any,
    ) -> "AxisRules":
        """Returns rules with some of them replaced, or new ones added at the end.

        Keywords are parameter rules: `rules.override(embed=None)` is
        `rules.override(params={"embed": None})`. New `paths` are tried before the present ones.
        """

        def merged(kind: Kind, changes: Mapping[str, Any]) -> Table:
            return tuple((dict(self.table(kind)) | dict(_table(changes, kind))).items())

        return dataclasses.replace(
            self,
            params=merged("params", {**(params or {}), **param_rules}),
            activations=merged("activations", activations or {}),
            paths=(*(paths or {}).items(), *self.paths),
        )

    def check(self, mesh: Any) -> None:
        """Raises `RuleError` when a rule names a mesh axis that neither the mesh nor the standard
        has; lists all such names."""
        faults = _unknown_mesh_axes(self, tuple(mesh_sizes(mesh)))
        if faults:
            raise RuleError("\n".join(faults))

    def resolve(
        self,
        logical_axes: Sequence[str | None],
        shape: Sequence[int],
        mesh: Any,
        kind: Kind = "params",
    ) -> Resolution:
        """Places one tensor.

        Args:
            logical_axes: One name, or `None` (replicated), for each dim.
            shape: The dims of the tensor.
            mesh: A `Mesh` or `AbstractMesh`, or a mapping from mesh axis to size.
            kind: Which table decides.

        Returns:
            The spec with a record of each choice; `faults` says what cannot be met.
        """
        sizes = mesh if isinstance(mesh, Mapping) else mesh_sizes(mesh)
        return _resolve(self, kind, tuple(logical_axes), tuple(shape), tuple(sizes.items()))

    def spec(
        self,
        logical_axes: Sequence[str | None],
        shape: Sequence[int],
        mesh: Any,
        kind: Kind = "params",
    ) -> PartitionSpec:
        """Returns the spec of one tensor.

        Raises:
            RuleError: If the tensor cannot be placed; the message lists every fault.
        """
        resolution = self.resolve(logical_axes, shape, mesh, kind)
        if resolution.faults:
            raise RuleError("\n".join(resolution.faults))
        return resolution.spec


@functools.lru_cache(maxsize=1024)
def _unknown_mesh_axes(rules: AxisRules, mesh_axes: tuple[str, ...]) -> tuple[str, ...]:
    known = {*mesh_axes, *STANDARD_AXES}
    faults = []
    for kind in ("params", "activations"):
        for logical, alternatives in rules.table(kind):
            for name in dict.fromkeys(n for a in alternatives for n in a if n not in known):
                faults.append(
                    f"the rule {logical!r} -> {name!r} ({kind}) names a mesh axis that does not "
                    f"exist.{did_you_mean(name, known)}\n"
                    f"  Mesh axes: {', '.join(mesh_axes) or 'none'}; standard: "
                    f"{', '.join(STANDARD_AXES)}."
                )
    name = rules.auto.mesh_axis if rules.auto else None
    if name is not None and name not in known:
        faults.append(
            f"auto placement over {name!r} names a mesh axis that does not exist."
            f"{did_you_mean(name, known)}"
        )
    return tuple(faults)


def _refusal(
    alternative: Alternative, dim_size: int, sizes: Mapping[str, int], used: Mapping[str, int]
) -> Refusal | None:
    """Says why an alternative does not fit a dim, or returns `None` when it does."""
    text = "+".join(alternative)
    for name in alternative:
        if sizes.get(name, 1) > 1 and name in used:
            reason = f"mesh axis {name!r} already shards dim {used[name]}"
            return Refusal(alternative, "used", reason)
    total = math.prod(sizes.get(name, 1) for name in alternative)
    if total == 1:
        return Refusal(alternative, "size_one", f"{text} has size 1 in this mesh")
    if dim_size % total:
        return Refusal(alternative, "indivisible", f"{text}={total} does not divide {dim_size}")
    return None


def _choose(
    dim: int,
    logical: str,
    rule: str,
    alternatives: tuple[Alternative, ...],
    dim_size: int,
    sizes: Mapping[str, int],
    used: dict[str, int],
) -> tuple[Choice, bool]:
    """Takes the first alternative that fits; the flag says whether the rule could be met."""
    refused: list[Refusal] = []
    for alternative in alternatives:
        if not alternative:
            return Choice(dim, logical, rule, (), tuple(refused)), True
        refusal = _refusal(alternative, dim_size, sizes, used)
        if refusal is None:
            taken = tuple(name for name in alternative if sizes.get(name, 1) > 1)
            used.update(dict.fromkeys(taken, dim))
            return Choice(dim, logical, rule, taken, tuple(refused)), True
        refused.append(refusal)
    # An axis of size 1 shards nothing and so fits, unless another was to shard in its place.
    met = all(r.cause == "size_one" for r in refused)
    return Choice(dim, logical, rule, (), tuple(refused)), met


@functools.lru_cache(maxsize=2**17)
def _resolve(
    rules: AxisRules,
    kind: Kind,
    logical_axes: LogicalAxes,
    shape: tuple[int, ...],
    mesh: tuple[tuple[str, int], ...],
) -> Resolution:
    sizes = dict(mesh)
    faults = list(_unknown_mesh_axes(rules, tuple(sizes)))
    if len(logical_axes) != len(shape):
        faults.append(
            f"logical axes {logical_axes} name {len(logical_axes)} dims, but the shape {shape} has "
            f"{len(shape)}.\n  Give one name, or None, for each dim."
        )
        return Resolution(PartitionSpec(), (), tuple(faults))
    order, table = _ranks(rules, kind)
    choices: list[Choice | None] = [None] * len(shape)
    used: dict[str, int] = {}
    ranked = sorted(range(len(shape)), key=lambda d: (order.get(logical_axes[d], len(order)), d))
    for dim in ranked:
        logical = logical_axes[dim]
        if logical is None:
            choices[dim] = Choice(dim, None, None, ())
            continue
        rule = logical if logical in table else ANY
        if rule not in table:
            faults.append(
                f"logical axis {logical!r} (dim {dim} of {logical_axes}) has no rule among the "
                f"{kind}.{did_you_mean(logical, table)}\n"
                f"  Add one, for example {kind}={{{logical!r}: None}}, or use one of: "
                f"{', '.join(table)}."
            )
            continue
        choice, met = _choose(dim, logical, rule, table[rule], shape[dim], sizes, used)
        choices[dim] = choice
        if not met:
            reasons = "; ".join(r.reason for r in choice.refused)
            faults.append(
                f"logical axis {logical!r} (dim {dim} of {logical_axes}, shape {shape}) cannot be "
                f"sharded: {reasons}.\n"
                f"  Change the dim or the mesh ({_mesh_text(sizes)}), or allow replication: "
                f"{kind}={{{logical!r}: {_allowing_none(table[rule])}}}."
            )
    entries = [_entry(c.mesh_axes) if c else None for c in choices]
    return Resolution(PartitionSpec(*entries), tuple(c for c in choices if c), tuple(faults))


@functools.lru_cache(maxsize=64)
def _ranks(
    rules: AxisRules, kind: Kind
) -> tuple[dict[str | None, int], dict[str, tuple[Alternative, ...]]]:
    table = dict(rules.table(kind))
    return {name: rank for rank, name in enumerate(table)}, table


def _entry(mesh_axes: Alternative) -> Any:
    if not mesh_axes:
        return None
    return mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes


def _mesh_text(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def _allowing_none(alternatives: tuple[Alternative, ...]) -> list[str | None]:
    return [*("+".join(a) for a in alternatives), None]


_ACTIVATIONS = {
    "batch": "data+fsdp+expert",
    "length": "context",
    "vocab": "tensor",
    "heads": "tensor",
    # Grouped-query attention may have fewer key-value heads than the tensor axis has devices.
    "kv_heads": ["tensor", None],
    "mlp": "tensor",
    "expert": "expert",
    "embed": None,
    "head_dim": None,
    "positions": None,
    "channels": None,
    "height": None,
    "width": None,
    "classes": None,
}

_REPLICATED = ("norm", "head_dim", "positions", "kernel_h", "kernel_w", "conv_in", "classes")

DATA = AxisRules(
    params={ANY: None},
    activations={"batch": "data", ANY: None},
    auto=Auto(None),
)
"""Parameters replicated, the batch over `data`."""

FSDP = AxisRules(
    params={
        "embed": "fsdp",
        "conv_out": "fsdp",
        **dict.fromkeys(
            ("vocab", "mlp", "heads", "kv_heads", "expert", "layers", *_REPLICATED), None
        ),
    },
    activations={"batch": "data+fsdp", ANY: None},
    auto=Auto("fsdp"),
)
"""Parameters, gradients and optimizer state over `fsdp`, the batch over `data` and `fsdp`.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", stage 3; Zhao et al. 2023, "PyTorch FSDP".
"""

STANDARD = AxisRules(
    params={
        "expert": "expert",
        "layers": "stage",
        "vocab": "tensor",
        "heads": "tensor",
        "kv_heads": ["tensor", None],
        "mlp": "tensor",
        "embed": "fsdp",
        "conv_out": "fsdp",
        **dict.fromkeys(_REPLICATED, None),
    },
    activations=_ACTIVATIONS,
    auto=Auto("fsdp"),
)
"""Every standard mesh axis: `data`, `fsdp`, `tensor`, `context`, `expert` and `stage`.

Source: Shoeybi et al. 2019, "Megatron-LM", for `tensor`; `FSDP` for `fsdp`.
"""

PRESETS: Mapping[str, AxisRules] = {"data": DATA, "fsdp": FSDP, "standard": STANDARD}


def preset(name: str) -> AxisRules:
    """Returns the preset of that name, in any case.

    Raises:
        RuleError: If there is none.
    """
    try:
        return PRESETS[name.lower()]
    except KeyError:
        raise RuleError(
            f"no rules are called {name!r}.{did_you_mean(name.lower(), PRESETS)}\n"
            f"  Presets: {', '.join(PRESETS)}."
        ) from None
