"""The default of gradient sums over `context`: once a step where the numbers are proven equal.

With several microbatches, sums that the compiler places are taken in each of them. Groups along
`context` that each compute the loss of their own positions sum once. Their numbers are the same if
positions meet in shared operations alone, such as attention, which exchange what they need
themselves. The proof is that of `sum_once`, where `opaque` stands for each shared operation.
"""

import dataclasses
import re
from typing import Any

import jax
from jaxtyping import PyTree

from shardlib.errors import ShardlibError
from shardlib.losses.aggregate import Mean, Output
from shardlib.losses.results import Sums
from shardlib.mesh import entry_axes
from shardlib.partitioner.row_sums import spreads
from shardlib.partitioner.spread import KEY, ROWS, SAME, lost
from shardlib.sharding.constrain import Scope, manual_axes
from shardlib.sharding.manual import NESTS_IN_MESH_ORDER_ONLY
from shardlib.sharding.shared_rows import proving
from shardlib.train.batches import batch_shardings
from shardlib.train.gradients import LossArguments, PartLoss
from shardlib.train.reduce.hierarchical import Hops
from shardlib.train.reduce.reduction import AXIS, CONTEXT, ContextGroups, Reduction
from shardlib.train.reduce.sum_once import (
    GradientSums,
    fault,
    held_by_groups,
    is_joined,
    is_mean,
    traced,
    unsafe_gather,
)

_EACH = "over context in each microbatch: "
# The proof speaks of what is cut, which is positions here. Paths and quoted names stay.
_IN_A_ROW = {
    "rows of the batch": "positions of a row",
    "row by row": "position by position",
    "rows": "positions",
}
_ROWS = re.compile(rf"(?<![\w./'])({'|'.join(_IN_A_ROW)})(?![\w./'])")


def with_context(
    over_data: GradientSums, loss: PartLoss, arguments: LossArguments, microbatches: int
) -> GradientSums:
    """Returns the sums of gradients with those over `context`, for a mesh that has several devices
    along it.

    Call it inside `sl.use`, outside of manual regions.
    """
    if microbatches == 1:
        return _added(over_data, over_data.reduction, "over context by the compiler")
    found = _obstacle(over_data, loss, arguments)
    if found is None:
        found = _groups(over_data, loss, arguments, microbatches)
    if isinstance(found, str):
        return _added(over_data, over_data.reduction, f"{_EACH}{found}")
    reduction = over_data.reduction
    if reduction is None:
        reduction = Reduction(Hops(CONTEXT, found.parts), (microbatches,))
    reduction = dataclasses.replace(reduction, context=found)
    return _added(
        over_data, reduction, "over context once a step: positions meet in attention alone"
    )


def _added(over_data: GradientSums, reduction: Reduction | None, why: str) -> GradientSums:
    return GradientSums(reduction, f"{over_data.why}; {why}")


def _obstacle(over_data: GradientSums, loss: PartLoss, arguments: LossArguments) -> str | None:
    """Returns why groups along `context` cannot work independently, whatever the loss computes."""
    scope, reduction = loss.definition.scope, over_data.reduction
    if around := manual_axes():
        return f"the step is in a region over {' and '.join(around)}"
    if reduction is None and scope.sizes.get(AXIS, 1) > 1:
        return "the compiler sums over data"
    names = list(scope.sizes)
    before = [name for name in names[: names.index(CONTEXT)] if name != AXIS]
    if NESTS_IN_MESH_ORDER_ONLY and before:
        return f"this jax compiles no region over {before[0]} within one over context"
    return held_by_groups(loss, arguments, CONTEXT)


def _position_dims(loss: PartLoss, batch: PyTree, scope: Scope) -> list[int | None] | None:
    """Returns the dim of each array that `context` splits; None if it does otherwise."""
    dims: list[int | None] = []
    for at in jax.tree.leaves(batch_shardings(batch, scope, loss.batch_axes)):
        entries = [entry_axes(entry) for entry in at.spec]
        mine = [dim for dim, axes in enumerate(entries) if CONTEXT in axes]
        if any(dim == 0 or entries[dim] != (CONTEXT,) for dim in mine) or len(mine) > 1:
            return None
        dims.append(mine[0] if mine else None)
    return dims


def _groups(
    over_data: GradientSums, loss: PartLoss, arguments: LossArguments, microbatches: int
) -> ContextGroups | str:
    """Returns the groups, or where positions of different groups meet in the loss."""
    scope, reduction = loss.definition.scope, over_data.reduction
    parts = scope.sizes[CONTEXT]
    dims = _position_dims(loss, arguments.batch, scope)
    if dims is None or all(dim is None for dim in dims):
        return "context does not split the positions alone"
    rows = microbatches * (1 if reduction is None else reduction.hops.size)
    try:
        with proving(1):
            whole = traced(loss, arguments, rows)
        with proving(parts):
            part = traced(loss, arguments, rows, (dims, parts))
    except Exception as error:  # A faulty loss raises again where the step is traced.
        known = str(error).splitlines()[0] if isinstance(error, ShardlibError) else ""
        return f"the loss needs its mesh: {known or type(error).__name__}"
    if gather := unsafe_gather(whole, scope, (AXIS, CONTEXT)):
        return gather
    params, state, _, key, inputs = arguments
    given = [SAME for _ in jax.tree.leaves((params, state))]
    given += [SAME if dim is None else ROWS for dim in dims]
    given += [lost(KEY) for _ in jax.tree.leaves(key)]
    given += [SAME for _ in jax.tree.leaves(inputs)]
    found = spreads(whole, part, given, parts)
    grads, sums = jax.tree.unflatten(jax.tree.structure(whole.shape), found)
    if any(isinstance(metric, Output) for metric in sums.values()):
        return "the loss returns outputs"
    if why := fault(grads, sums, _is_counted):
        return _ROWS.sub(lambda found: _IN_A_ROW[found[0]], why)
    return ContextGroups(parts, _factors(sums, parts))


def _is_counted(metric: Any) -> bool:
    """Returns whether the parts, with `_factors`, give a metric of the whole."""
    if not isinstance(metric, Mean):
        return is_joined(metric)
    found: list[Any] = [metric.total, metric.weight]
    return all(x.zero or x.as_sum().kind == "sum" for x in found)


def _factors(sums: Sums, parts: int) -> dict[str, tuple[float, ...]]:
    """Returns the factors of means whose total and weight count parts differently."""
    factors = {}
    for name, metric in sums.items():
        if isinstance(metric, Mean) and not is_mean(metric):
            found: list[Any] = [metric.total, metric.weight]
            factors[name] = tuple(float(parts) ** x.as_sum().degree for x in found)
    return factors
