"""Reduction of the gradients of data-parallel groups, with its dtype and hops.

With a `ReductionConfig`, the groups along `data` work independently until the end of the step. Each
computes the gradients of its rows over all its microbatches without communication, and then
everything is summed at once. By default groups do so where `once` proves that the numbers stay the
same; else the compiler places the sums over `data`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Int, PyTree, Shaped

from shardlib.config import configclass
from shardlib.errors import ConfigError, ModelError, RuleError
from shardlib.losses.aggregate import join, map_outputs, nothing, split_outputs, with_outputs
from shardlib.losses.microbatch import split
from shardlib.losses.results import Sums
from shardlib.mesh import entry_axes, mesh_sizes
from shardlib.paths import named_leaves
from shardlib.sharding.manual import axis_size, manual
from shardlib.sharding.partition import Placement, pin
from shardlib.sharding.shared_rows import rows_cut
from shardlib.train.batches import batch_shardings
from shardlib.train.gradients import Engine, Gradients, LossArguments, PartLoss
from shardlib.train.reduce.hierarchical import Hops, kept_dim, outer_degree, sum_groups
from shardlib.train.reduce.uneven import arrange_batch, balance
from shardlib.train.state import Definition

AXIS = "data"
"""The mesh axis of the groups."""
CONTEXT = "context"
"""The mesh axis along which groups may also divide the positions of a row."""


@configclass
class ReductionConfig:
    """Reduction of gradients over `data`. With the defaults, gradients of several microbatches are
    summed once per step, in float32, where that is proven to give the same numbers, and otherwise
    where the compiler decides.

    Any other setting sums gradients once per step, whatever the number of microbatches, and gives
    each group its own randomness. Dropout then equals a run on one device with
    `groups * microbatches` microbatches, starting with the first group.
    """

    dtype: Literal["auto", "f32", "bf16", "compiler"] = "auto"
    """Dtype in which gradients are sent over `data`. Sums are in float32. `auto`: float32, unless
    nothing else is set here and the compiler decides. `compiler`: the compiler decides in any case,
    and sums in each microbatch."""
    compress_dcn: bool = False
    """Whether gradients are sent in bfloat16, but only between slices or hosts."""
    outer: int | None = None
    """Slices or hosts that `data` spans, for example 4 in `data=4x8`. Unset: detected from the
    devices."""
    group_microbatches: tuple[int, ...] | None = None
    """Microbatches of each group along `data`, for groups of unequal speed. `microbatches` of the
    step stays 1, and every microbatch in the batch has the same number of rows."""
    group_seconds: tuple[float, ...] | None = None
    """Measured time of a microbatch on each group, in any unit. `groups * microbatches`
    microbatches are divided so that all groups end together."""

    def __post_init__(self) -> None:
        faults = []
        if self.outer is not None and self.outer < 1:
            faults.append(f"outer must be at least 1, or null, not {self.outer}")
        if any(count < 1 for count in self.group_microbatches or ()):
            faults.append(
                f"group_microbatches must each be at least 1, not {list(self.group_microbatches)}"  # type: ignore[arg-type]
            )
        if any(not 0 < s < float("inf") for s in self.group_seconds or ()):
            faults.append(f"group_seconds must be positive, not {list(self.group_seconds)}")  # type: ignore[arg-type]
        if self.group_microbatches is not None and self.group_seconds is not None:
            faults.append("group_microbatches and group_seconds exclude each other: give one")
        others = (self.outer, self.group_microbatches, self.group_seconds)
        if self.dtype == "compiler" and (self.compress_dcn or any(x is not None for x in others)):
            faults.append("dtype is compiler, which allows no other setting: leave them out")
        if faults:
            raise ValueError("; ".join(faults))


@dataclasses.dataclass(frozen=True)
class ContextGroups:
    """Groups along `context`, each with a part of the positions of every row."""

    parts: int
    """Number of parts of a row."""
    factors: Mapping[str, tuple[float, ...]]
    """Factor of each array of a metric, in the order of its leaves: the value of the whole is the
    factor times the sum over groups. It is 1 / `parts` for numbers that every group counts."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A `ReductionConfig` resolved for a mesh."""

    hops: Hops
    counts: tuple[int, ...]
    """Microbatches of each group along `data`."""
    context: "ContextGroups | None" = None
    """The groups along `context`; None if all devices of a group share the positions of a row."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the groups."""
        return (self.hops.axis, *self.also)

    @property
    def also(self) -> tuple[str, ...]:
        """The axes of the groups besides the one of `hops`."""
        return () if self.context is None or self.hops.axis == CONTEXT else (CONTEXT,)

    @property
    def even(self) -> bool:
        """Whether all groups take the same number of microbatches."""
        return len(set(self.counts)) == 1

    @property
    def microbatches(self) -> int:
        """Largest number of microbatches of a group, into which an arranged batch is split."""
        return max(self.counts)

    @property
    def inner_microbatches(self) -> int:
        """Number of microbatches into which the inner engine splits its input."""
        return self.counts[0] if self.even else 1

    def with_stages(self, definition: Definition) -> frozenset[str]:
        """Returns the paths of the gradients that a pipeline sums over its stages and over groups
        at once: of the parameters that all stages share. In two sums they would send more."""
        if axis_size("stage") == 1 or not self.hops.flat:
            return frozenset()
        return frozenset(
            path
            for path, placement in definition.params.items()
            if not placement.has_stages
            and kept_dim(definition.gradients[path].spec, self.hops.axis) is None
        )

    def arrange(self, batch: PyTree) -> PyTree:
        """Returns a plain batch laid out for `reduced_gradients`; see `arrange_batch`."""
        return arrange_batch(batch, self.counts)


def plan_reduction(
    config: ReductionConfig,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    params: Mapping[str, Placement] | None = None,
    model_state: PyTree = None,
) -> Reduction | None:
    """Returns the configured reduction of gradients on a mesh.

    It is None if nothing is configured, the compiler decides, or the mesh has a single group.

    Args:
        config: The requested reduction.
        mesh: The mesh of the state.
        microbatches: Microbatches of each group.
        params: `Definition.params`, to check that groups hold whole parameters.
        model_state: The model state that a call updates, which must be empty.

    Raises:
        ConfigError: If the config does not fit the mesh or the microbatches. The message lists all
            faults.
        RuleError: If parameters are sharded over `data`.
        ModelError: If the model updates its own state.
    """
    if config.dtype == "compiler" or config == ReductionConfig():
        return None
    sizes = mesh_sizes(mesh)
    groups = sizes.get(AXIS, 1)
    outer = config.outer or (outer_degree(mesh, AXIS) if groups > 1 else 1)
    if faults := _faults(config, mesh, groups, outer, microbatches):
        raise ConfigError("\n".join(faults))
    if groups == 1:
        return None
    _check_independent(params or {}, model_state)
    counts = config.group_microbatches or (microbatches,) * groups
    if config.group_seconds is not None:
        counts = balance(config.group_seconds, groups * microbatches)
    bf16 = config.dtype == "bf16"
    hops = Hops(AXIS, groups // outer, outer, bf16, bf16 or config.compress_dcn)
    return Reduction(hops, counts)


def _faults(
    config: ReductionConfig, mesh: Mesh, groups: int, outer: int, microbatches: int
) -> list[str]:
    sizes, faults = mesh_sizes(mesh), []
    if AxisType.Explicit in mesh.axis_types:
        faults.append(
            "reduction: groups need a mesh whose axes are automatic, and this one's are "
            "explicit.\n  Make the mesh with axis_types='auto'."
        )
    if groups % outer:
        faults.append(
            f"reduction.outer is {outer}, which does not divide {AXIS}={groups}.\n"
            f"  Use the outer degree of the mesh, or leave it out."
        )
    # An abstract mesh does not know its slices.
    if config.compress_dcn and outer == 1 and isinstance(mesh, Mesh):
        faults.append(
            f"reduction.compress_dcn is set, but {AXIS}={groups} crosses no slices or hosts.\n"
            "  Set reduction.outer to how many it crosses, or reduction.dtype to bf16."
        )
    for key in ("group_microbatches", "group_seconds"):
        given = getattr(config, key)
        if given is not None and len(given) != groups:
            faults.append(
                f"reduction.{key} names {len(given)} groups, but the mesh has {AXIS}={groups}.\n"
                f"  Give {groups}, one for each group in order."
            )
    if config.group_microbatches is not None and microbatches != 1:
        faults.append(
            f"microbatches={microbatches} conflicts with reduction.group_microbatches, which sets "
            "it for each group.\n  Leave microbatches at 1."
        )
    uneven = len(set(config.group_microbatches or config.group_seconds or ())) > 1
    meeting = [name for name in ("stage", "context") if sizes.get(name, 1) > 1]
    if uneven and meeting:
        faults.append(
            f"groups that take unequal numbers of microbatches cannot split "
            f"{' and '.join(meeting)}: all groups take part in their collective-permutes, so "
            "the others would wait for a group that has finished.\n"
            f"  Use a mesh without {' and '.join(meeting)}, or the same count for every group."
        )
    return faults


def _check_independent(params: Mapping[str, Placement], model_state: PyTree) -> None:
    """Raises for parameters and model state that make groups depend on each other."""
    split_up = [path for path, p in params.items() if kept_dim(p.spec, AXIS) is not None]
    if split_up:
        raise RuleError(
            f"{', '.join(split_up[:4])}{', ...' if len(split_up) > 4 else ''}: split over {AXIS}, "
            "but groups that reduce their gradients once a step hold whole parameters.\n"
            f"  Split parameters over fsdp, and over {AXIS} gradients or optimizer state at most."
        )
    held = list(named_leaves(model_state))
    if held:
        raise ModelError(
            f"the model updates {', '.join(held[:4])}{', ...' if len(held) > 4 else ''} as it "
            "runs, which would be different in every group.\n"
            "  Leave train.reduction out to compute such statistics over the whole batch."
        )


def reduced_gradients(
    groups: Callable[[PartLoss, LossArguments, Reduction], tuple[PyTree, Sums]],
    loss: PartLoss,
    arguments: LossArguments,
    reduction: Reduction,
) -> Gradients:
    """Returns the gradients of a batch, computed by each group separately and summed once.

    The sums of the loss and of its weight are reduced with the gradients, so the mean is taken over
    the whole batch, whatever part of it each group holds.

    Args:
        groups: `groups(loss, arguments, reduction)` returns the gradients and sums of all groups as
            arrays [groups, ...] sharded over `data`. It is `groups_apart` with any engine, or
            `pipelined_groups`, of which each group holds the sums of `reduction.with_stages`.
        loss: The loss.
        arguments: Its arguments, of which no call updates the model state. The batch is plain if
            groups are equal, else from `arrange_batch`. Inputs are replicated over the groups.
        reduction: The result of `plan_reduction`.
    """
    grads, sums = groups(loss, arguments, reduction)
    sums, outputs = split_outputs(sums)
    definition = loss.definition
    summed = reduction.with_stages(definition)
    places, hops = definition.gradients, reduction.hops
    grads, sums = sum_groups(grads, sums, places, hops, summed, reduction.also)
    # Groups hold consecutive blocks of rows, so their outputs are concatenated.
    outputs = map_outputs(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), outputs)
    grads = pin(grads, definition.gradients, definition.scope)
    return Gradients(grads, with_outputs(sums, outputs), arguments.model_state)


def groups_apart(
    engine: Engine, loss: PartLoss, arguments: LossArguments, reduction: Reduction
) -> tuple[PyTree, Sums]:
    """Returns the gradients and sums of each group, arrays [groups, ...] sharded over `data`; see
    `reduced_gradients`. If groups take unequal numbers of microbatches, `engine`, which computes
    the rows of a group, is called on one microbatch at a time, and must not split it further."""
    counts = jnp.asarray(reduction.counts, jnp.int32)
    firsts = jnp.cumsum(counts) - counts
    context = reduction.context

    def group(*leaves: Any) -> PyTree:
        arguments = LossArguments(*leaves)
        index = jax.lax.axis_index(AXIS) if AXIS in reduction.axes else 0

        def run(rows: PyTree, first: jax.Array) -> tuple[PyTree, Sums]:
            result = engine(loss, arguments._replace(batch=rows), first)
            return result.grads, result.sums

        if reduction.even:
            with rows_cut(context.parts) if context else contextlib.nullcontext():
                added = run(arguments.batch, firsts[index])
        else:
            parts = split(arguments.batch, reduction.microbatches)
            added = _add_up(run, parts, firsts[index], counts[index])
        if context:
            added = added[0], _scaled(added[1], context.factors)
        return jax.tree.map(lambda x: x[None], added)

    shared, own = PartitionSpec(), PartitionSpec(reduction.axes)
    batch = _group_specs(loss, arguments.batch, reduction)
    return manual(group, reduction.axes, (shared, shared, batch, shared, shared), own)(*arguments)


def _group_specs(loss: PartLoss, batch: PyTree, reduction: Reduction) -> PyTree:
    """Returns the part of each array of a batch that a group holds."""
    rows = AXIS if AXIS in reduction.axes else None
    if reduction.context is None:
        return PartitionSpec(rows)
    placed = batch_shardings(batch, loss.definition.scope, loss.batch_axes)
    return jax.tree.map(
        lambda at: PartitionSpec(
            rows, *(CONTEXT if CONTEXT in entry_axes(entry) else None for entry in at.spec[1:])
        ),
        placed,
    )


def _scaled(sums: Sums, factors: Mapping[str, tuple[float, ...]]) -> Sums:
    """Returns the sums of a group with the factors of `ContextGroups`."""
    scaled = dict(sums)
    for name, of_leaves in factors.items():
        leaves, treedef = jax.tree.flatten(sums[name])
        pairs = zip(leaves, of_leaves, strict=True)
        scaled[name] = treedef.unflatten([x if by == 1 else x * by for x, by in pairs])
    return scaled


def _add_up(
    run: Callable[[PyTree, jax.Array], PyTree],
    parts: PyTree[Shaped[Array, "microbatches rows ..."]],
    first: Int[Array, ""],
    count: Int[Array, ""],
) -> PyTree:
    """Returns the sum over `count` microbatches, a number that differs by group at run time."""

    def body(at: jax.Array, added: PyTree) -> PyTree:
        part = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, at, keepdims=False), parts)
        return join(added, run(part, first + at))

    zero = jnp.zeros((), jnp.int32)
    shapes = jax.eval_shape(
        run, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts), zero
    )
    if jax.tree.leaves(split_outputs(shapes)[1]):
        raise ModelError(
            "the loss returns outputs, but groups take unequal numbers of microbatches, so the "
            "rows are not in batch order.\n"
            "  Give every group the same number of microbatches, or return no outputs."
        )
    return jax.lax.fori_loop(zero, count, body, nothing(shapes))
