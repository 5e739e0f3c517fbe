"""The default of gradient sums over `data`: once a step where the numbers are proven to be equal.

With several microbatches, sums that the compiler places are taken in each of them. Groups along
`data` that work independently sum once. Their numbers are the same if the loss and every metric are
sums over rows, or means over equal numbers of rows: no row meets another, and no random number is
drawn. This is proven on the traced loss and its gradient; see `shardlib.partitioner.row_sums`.
Otherwise the compiler places the sums, in each microbatch.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jaxtyping import PyTree

from shardlib.errors import ShardlibError
from shardlib.functional import updated
from shardlib.losses.aggregate import Max, Mean, Min, Output, Sum
from shardlib.losses.results import Sums
from shardlib.mesh import entry_axes
from shardlib.nn.lookup import EXCHANGE
from shardlib.partitioner import Traced, trace
from shardlib.partitioner.entry import operations
from shardlib.partitioner.program import source_of
from shardlib.partitioner.row_sums import spreads
from shardlib.partitioner.spread import KEY, ROWS, SAME, Spread, first_lost, lost
from shardlib.sharding.constrain import Scope, plainly
from shardlib.train.batches import batch_shardings
from shardlib.train.gradients import LossArguments, PartLoss
from shardlib.train.reduce.hierarchical import kept_dim
from shardlib.train.reduce.reduction import AXIS, Reduction, ReductionConfig, plan_reduction

_ONCE = ReductionConfig(dtype="f32")
_EACH = "summed over data in each microbatch: "


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The sums of gradients over `data` and `context`, and the reason."""

    reduction: Reduction | None
    """The reduction at the end of a step; None if the compiler places the sums."""
    why: str

    def __str__(self) -> str:
        return self.why


def choose_sums(loss: PartLoss, arguments: LossArguments, microbatches: int) -> GradientSums:
    """Returns the sums of gradients where no reduction is configured.

    Call it inside `sl.use`, outside of manual regions.
    """
    if microbatches == 1:
        return GradientSums(None, "summed over data by the compiler: the step has one microbatch")
    definition = loss.definition
    reason = _obstacle(loss, arguments) or _meeting(loss, arguments, microbatches)
    if reason is not None:
        return GradientSums(None, f"{_EACH}{reason}")
    reduction = plan_reduction(_ONCE, definition.scope.mesh, microbatches=microbatches)
    return GradientSums(reduction, "summed over data once a step: no row of a batch meets another")


def _obstacle(loss: PartLoss, arguments: LossArguments) -> str | None:
    """Returns why groups along `data` cannot work independently, whatever the loss computes."""
    scope = loss.definition.scope
    before = list(scope.sizes)[: list(scope.sizes).index(AXIS)]
    if any(scope.sizes[name] > 1 for name in before):
        return f"data comes after {', '.join(before)} in the mesh"
    if held := held_by_groups(loss, arguments, AXIS):
        return held
    return None if _splits_rows(loss, arguments.batch, scope) else "data does not split the rows"


def held_by_groups(loss: PartLoss, arguments: LossArguments, axis: str) -> str | None:
    """Returns what groups along a mesh axis would have to share besides sums."""
    definition, scope = loss.definition, loss.definition.scope
    if AxisType.Explicit in scope.mesh.axis_types:
        return "the axes of the mesh are explicit"
    if scope.sizes.get("stage", 1) > 1:
        return "the mesh has stages"
    if updated(definition.module, arguments.model_state):
        return "the model updates its own state"
    held = {"parameters": definition.params, "gradients": definition.gradients}
    held["model state"] = definition.model_state
    for name, places in held.items():
        if any(kept_dim(place.spec, axis) is not None for place in places.values()):
            return f"{name} are split over {axis}"
    if any(kept_dim(x.spec, axis) is not None for x in jax.tree.leaves(loss.inputs_at)):
        return f"inputs of the loss are split over {axis}"
    return None


def _splits_rows(loss: PartLoss, batch: PyTree, scope: Scope) -> bool:
    """Returns whether `data` is the major axis of the rows of every array, and splits no other
    dim."""
    specs = [x.spec for x in jax.tree.leaves(batch_shardings(batch, scope, loss.batch_axes))]
    rows = [entry_axes(spec[0]) if len(spec) else () for spec in specs]
    others = [axis for spec in specs for entry in spec[1:] for axis in entry_axes(entry)]
    return AXIS not in others and all(axes[:1] == (AXIS,) for axes in rows)


def _meeting(loss: PartLoss, arguments: LossArguments, microbatches: int) -> str | None:
    """Returns where rows of different groups meet in the loss, or None if they do not."""
    groups = loss.definition.scope.sizes[AXIS]
    try:
        with plainly():
            whole = traced(loss, arguments, microbatches)
            part = traced(loss, arguments, microbatches * groups)
    except Exception as error:  # A faulty loss raises again where the step is traced.
        if isinstance(error, ShardlibError):
            return f"the loss needs its mesh: {str(error).splitlines()[0]}"
        return f"the loss needs its mesh, {type(error).__name__}"
    if gather := unsafe_gather(whole, loss.definition.scope):
        return gather
    params, state, batch, key, inputs = arguments
    kinds = (SAME, (params, state)), (ROWS, batch), (lost(KEY), key), (SAME, inputs)
    given = [kind for kind, tree in kinds for _ in jax.tree.leaves(tree)]
    found = spreads(whole, part, given, groups)
    found = jax.tree.unflatten(jax.tree.structure(whole.shape), found)
    return fault(*found)


def unsafe_gather(traced: Traced, scope: Scope, groups: Sequence[str] = (AXIS,)) -> str | None:
    """Returns a gather, other than of `lookup`, that XLA may be unable to partition in a group.

    XLA 0.10 ends the process for some tables that two axes cut, in a region manual over a third.
    """
    if sum(size > 1 for name, size in scope.sizes.items() if name not in groups) < 2:
        return None
    for operation in operations(traced.closed.jaxpr):
        if operation.name == "gather" and EXCHANGE not in operation.stack:
            return f"XLA cannot partition every gather in a group, as at {source_of(operation)}"
    return None


def traced(
    loss: PartLoss,
    arguments: LossArguments,
    parts: int,
    positions: tuple[Sequence[int | None], int] = ((), 1),
) -> Traced:
    """Returns the gradients and sums for one of `parts` equal parts of the rows of the batch,
    traced. `positions`: the dim of the positions in each leaf, and the number of parts of the
    positions."""

    def abstract(x: Any, parts: int = 1) -> jax.ShapeDtypeStruct:
        shape = jax.numpy.shape(x)
        shape = (shape[0] // parts, *shape[1:]) if parts > 1 else shape
        return jax.ShapeDtypeStruct(shape, jax.numpy.result_type(x))

    rest = jax.tree.map(abstract, arguments._replace(batch=()))
    batch = jax.tree.map(lambda x: abstract(x, parts), arguments.batch)
    batch = _of_positions(batch, *positions)

    def derive(*arguments: PyTree) -> tuple[PyTree, Sums]:
        grads, (sums, _) = loss.derive(*arguments)
        return grads, sums

    return trace(derive, tuple(rest._replace(batch=batch)))


def _of_positions(batch: PyTree, dims: Sequence[int | None], parts: int) -> PyTree:
    """Returns the shapes of a batch with one of several parts of the positions."""
    if parts == 1:
        return batch
    leaves, treedef = jax.tree.flatten(batch)
    cut = []
    for x, dim in zip(leaves, dims, strict=True):
        shape = [size // parts if at == dim else size for at, size in enumerate(x.shape)]
        cut.append(jax.ShapeDtypeStruct(tuple(shape), x.dtype))
    return treedef.unflatten(cut)


def _is_spread(x: object) -> bool:
    return isinstance(x, Spread)


def is_joined(metric: Any) -> bool:
    """Returns whether an aggregate of the whole batch is the join of the aggregates of its
    parts."""
    if isinstance(metric, Mean):
        return is_mean(metric)
    value: Any = metric.value
    if isinstance(metric, Sum):
        return is_sum(value, 0)
    kinds = {Max: ("max", "same"), Min: ("min", "same"), Output: ("rows",)}
    return value.kind in kinds[type(metric)] and not value.degree


def is_mean(mean: Any) -> bool:
    """Returns whether total and weight are sums over rows with the same factor, which divides
    out."""
    degree = mean.weight.as_sum().degree
    return is_sum(mean.weight, degree) and is_sum(mean.total, degree)


def is_sum(spread: Spread, degree: int) -> bool:
    total = spread.as_sum()
    return spread.zero or (total.kind == "sum" and total.degree == degree)


def fault(grads: PyTree, sums: Sums, is_joined: Callable[[Any], bool] = is_joined) -> str | None:
    """Returns why gradients or metrics, as relations, are not sums over rows; None if they are."""
    leaves = jax.tree.leaves((sums, grads), is_leaf=_is_spread)
    if gone := first_lost(leaves):
        return gone.why
    loss: Any = sums["loss"]
    summed = Mean(loss.total, loss.weight)
    whole = all(is_mean(Mean(x, loss.weight)) for x in jax.tree.leaves(grads, is_leaf=_is_spread))
    if not (whole and is_mean(summed)):
        return "the loss is neither a mean over rows, nor a Mean of two sums over rows"
    wrong = next((name for name, metric in sums.items() if not is_joined(metric)), None)
    return None if wrong is None else f"the metric {wrong!r} is not computed row by row"
