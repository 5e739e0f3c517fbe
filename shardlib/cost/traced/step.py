"""A traced step on any mesh: layouts of its arrays, and computation and communication per
device."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardlib.cost.costs import Pass
from shardlib.cost.layout import AXES, Layout
from shardlib.cost.traced.costs import Tally, Walk
from shardlib.cost.traced.layout import (
    MICRO,
    Axes,
    Moved,
    Spec,
    Spreading,
    ValueSharding,
    replicated,
    spec_of,
)
from shardlib.cost.traced.stages import rerun, spec_in_step
from shardlib.functional import FunctionalModule
from shardlib.mesh import entry_axes
from shardlib.paths import path_string
from shardlib.rules import AxisRules
from shardlib.rules.resolve import ANY
from shardlib.sharding.partition import Placement, place, place_model_state, place_optimizer

BatchAxes = Mapping[str, tuple[str | None, ...]]
Places = Mapping[str, Mapping[str, Placement]]
Mesh = tuple[int, ...]
"""Degrees of `AXES`."""


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """The programs of one step, without a mesh."""

    gradient: Any
    """Jaxpr of the gradients of a batch and its loss, from parameters, model state, batch and
    key."""
    update: Any
    """Jaxpr of the update, from gradients, optimizer state and parameters."""
    module: FunctionalModule
    params: Any
    """Shapes of the parameters in their stored dtype."""
    model_state: Any
    opt_state: Any
    examples: Any
    """Shapes of the batch."""
    rules: AxisRules
    batch_axes: BatchAxes
    names: frozenset[str]
    """Logical axes that the model names."""
    asks_platform: bool = False
    """Whether the model asked for a platform that was not given."""

    @functools.cached_property
    def batch(self) -> int:
        """Examples of the batch."""
        return jax.tree.leaves(self.examples)[0].shape[0]

    @functools.cached_property
    def length(self) -> int:
        """Size of the dim that the batch names `length`; 1 if no dim has this name."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.examples):
            axes = self.batch_axes.get(path_string(path), ())
            if "length" in axes:
                return leaf.shape[axes.index("length")]
        return 1

    @functools.cached_property
    def mesh_axes(self) -> frozenset[str]:
        """Mesh axes that the rules assign to logical axes of the model."""
        axes = {
            name
            for kind in ("params", "activations")
            for logical, alternatives in self.rules.table(kind)  # type: ignore[arg-type]
            if logical in self.names or logical == ANY
            for alternative in alternatives
            for name in alternative
            # The batch alone does not need the expert axis: `data` shards it as well.
            if name != "stage" and (name, logical) != ("expert", "batch")
        }
        auto = self.rules.auto.mesh_axis if self.rules.auto else None
        return frozenset(axes | ({auto} if auto else set()))

    def batch_of(self, batch: int) -> Any:
        """Returns the shapes of a batch of `batch` examples."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype), self.examples
        )

    def costs(
        self, layout: Layout, parts: float, platform: str | None = None
    ) -> tuple[Tally, Tally]:
        """Returns the costs of one device of a platform for a microbatch, which is one of `parts`
        equal parts of the traced batch, and for the update after it. Gradients that are summed once
        go straight to the parts that are updated, if the rules cut optimizer state otherwise."""
        straight = layout.microbatches == 1 and self.rules.opt_state is not None
        wanted = "updates" if straight else "gradients"
        microbatch = self._summed(layout.sizes, layout.zero, parts, platform, wanted)
        return microbatch, self.update_costs(layout)

    def update_costs(self, layout: Layout) -> Tally:
        """Returns the costs of one device for the update."""
        return self._updated(layout.sizes, layout.zero)

    def places(self, layout: Layout) -> Places:
        """Returns the placements of parameters, model state, gradients and optimizer state.

        Raises:
            RuleError: If the rules cannot place them.
        """
        return self._placed(layout.sizes, layout.zero)

    def batch_laid(self, layout: Layout, batch: int) -> list[ValueSharding]:
        """Returns the layouts of the leaves of a batch of `batch` examples.

        Raises:
            RuleError: If the rules cannot place them.
        """
        sizes, laid = _sizes(layout.sizes), []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.batch_of(batch)):
            rank = len(leaf.shape)
            axes = self.batch_axes.get(path_string(path), ("batch", *[None] * (rank - 1))[:rank])
            spec = spec_of(self.rules.spec(axes, leaf.shape, sizes, "activations"), rank)
            pairs = zip(axes, spec, strict=True)
            laid.append(
                ValueSharding(tuple((*cut, MICRO) if a == "batch" else cut for a, cut in pairs))
            )
        return laid

    @functools.cached_property
    def _placed(self) -> Any:
        return functools.lru_cache(1024)(self._place)

    @functools.cached_property
    def _summed(self) -> Any:
        return functools.lru_cache(4096)(self._sum)

    @functools.cached_property
    def _updated(self) -> Any:
        return functools.lru_cache(1024)(self._update)

    def _place(self, degrees: Mesh, zero: int) -> Places:
        mesh = AbstractMesh(degrees, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        whole = place(self.params, self.module.axes, self.rules, mesh)
        gradients = place(self.params, self.module.axes, self.rules.of("gradients"), mesh)
        moments = place(self.params, self.module.axes, self.rules.of("opt_state"), mesh)
        named = self.module.axes, self.rules, mesh, self.module.frozen
        state = place_model_state(self.model_state, *named)
        if zero < 3:
            whole = {path: _unsharded(one) for path, one in whole.items()}
            state = {path: _unsharded(one) for path, one in state.items()}
        if zero < 2:
            gradients = {path: _unsharded(one) for path, one in gradients.items()}
        return {
            "params": whole,
            "model_state": state,
            "gradients": gradients,
            "updates": moments,
            "moments": place_optimizer(self.opt_state, moments),
        }

    def _sum(
        self, degrees: Mesh, zero: int, parts: float, platform: str | None, section: str
    ) -> Tally:
        """Returns the costs of the forward and backward pass, with the gradient sums to the
        placements of a section."""
        places = self._placed(degrees, zero)
        params, frozen = places["params"], self.module.frozen
        layout = Layout(**dict(zip(AXES, degrees, strict=True)))
        shardings = [
            *(_laid_in_step(one, is_param=True) for one in params.values()),
            *(_laid_in_step(one, path in frozen) for path, one in places["model_state"].items()),
            *self.batch_laid(layout, self.batch),
        ]
        jaxpr = self.gradient
        shardings += [replicated(var.aval) for var in jaxpr.invars[len(shardings) :]]
        constants = [replicated(var.aval) for var in jaxpr.constvars]
        wanted = [spec_in_step(one) for one in places[section].values()]
        walk = self._on(degrees, parts, platform)
        outs, costs = walk.run(jaxpr, (*constants, *shardings), gradients=wanted)
        if costs.staged is not None:
            costs.staged = rerun(costs.staged)
        leaves = [jax.ShapeDtypeStruct(p.shape, jnp.float32) for p in jax.tree.leaves(self.params)]
        gradients = outs[: len(params)]
        _relay(costs, "backward", self._on(degrees, parts), leaves, gradients, wanted)
        return costs

    def _update(self, degrees: Mesh, zero: int) -> Tally:
        places = self._placed(degrees, zero)
        shardings = [_laid(places[part]) for part in ("updates", "moments", "updates")]
        constants = [replicated(var.aval) for var in self.update.constvars]
        walk, leaves = self._on(degrees, 1), jax.tree.leaves(self.params)
        outs, costs = walk.run(self.update, sum(shardings, constants))
        stored = (spec_of(one.spec, len(one.shape)) for one in places["params"].values())
        _relay(costs, "forward", walk, leaves, outs[: len(leaves)], stored)
        return costs

    def _on(self, degrees: Mesh, parts: float, platform: str | None = None) -> Walk:
        named = _sizes(degrees)

        def resolve(names: tuple[str | None, ...], shape: tuple[int, ...], kind: str) -> Spec:
            found = self.rules.resolve(names, shape, named, kind)  # type: ignore[arg-type]
            return spec_of(found.spec, len(shape))

        return Walk({**named, MICRO: parts}, resolve, platform)


def shards(placement: Placement, layout: Layout, *, without: Axes = ()) -> int:
    """Returns the number of shards of an array on a mesh."""
    axes: Axes = tuple(axis for entry in placement.spec for axis in entry_axes(entry))
    return math.prod(layout.size(axis) for axis in axes if axis not in without)


def _relay(
    costs: Tally,
    during: Pass,
    walk: Walk,
    leaves: Sequence[Any],
    shardings: Sequence[ValueSharding],
    wanted: Iterable[Spec],
) -> None:
    """Counts the collectives that bring arrays of the parameters' shapes to their wanted
    layouts."""

    def count(moved: Moved) -> None:
        costs.moved[during, moved] += 1

    spread = Spreading(walk.sizes, walk.resolve, count)
    for leaf, laid, spec in zip(leaves, shardings, wanted, strict=True):
        spread.relaid(leaf, dataclasses.replace(laid, is_param=True), spec)


def _sizes(degrees: Mesh) -> dict[str, int]:
    return dict(zip(AXES, degrees, strict=True))


def _laid(places: Mapping[str, Placement]) -> list[ValueSharding]:
    return [ValueSharding(spec_of(one.spec, len(one.shape))) for one in places.values()]


def _laid_in_step(one: Placement, is_param: bool) -> ValueSharding:
    return ValueSharding(spec_in_step(one), (), is_param)


def _unsharded(placement: Placement) -> Placement:
    """Returns a placement without `fsdp`."""
    entries = [
        tuple(a for a in entry_axes(entry) if a != "fsdp") or None for entry in placement.spec
    ]
    resolution = placement.resolution._replace(spec=PartitionSpec(*entries))
    return dataclasses.replace(placement, resolution=resolution)
