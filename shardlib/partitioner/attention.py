"""Factors of attention that is traced as one operation."""

from collections.abc import Collection

from shardlib.errors import PartitionError
from shardlib.jaxprs import Operation
from shardlib.mesh import entry_axes
from shardlib.nn.attention.as_one import RowAttention
from shardlib.nn.attention.order import AXIS
from shardlib.nn.attention.plan import row_axes
from shardlib.nn.attention.region import cut_by_rules
from shardlib.partitioner.factors import (
    Arrays,
    Assignment,
    DevicePiece,
    Dim,
    Factors,
    bind,
    piece_shape,
    rule,
)
from shardlib.partitioner.layout import Sizes
from shardlib.partitioner.program import source_of
from shardlib.partitioner.regions import partial_region
from shardlib.sharding.constrain import active
from shardlib.sharding.shared_rows import OPAQUE

ROWS, LENGTH, HEADS = 0, 1, 2
"""The factors of attention. The length is one only if devices may share rows."""
_BACKWARD = 2.5
"""Products of the gradient for each of attention, as in `cost.machine.kernels.FusedAttention`."""


@rule(OPAQUE)
def attention(operation: Operation) -> Factors | None:
    """Rows, positions and key-value heads are factors of all operands. Keys of another length have
    whole rows, as have their queries. The gradient of sinks is a sum over rows and positions, a
    number for each head, which is not counted."""
    what, _ = operation.params["what"]
    if not isinstance(what, RowAttention):
        return None
    query, key, value = (var.aval.shape for var in operation.invars[:3])
    is_gradient = operation.params["linear"]
    length = LENGTH if what.shares_rows else None
    operands = [_dims(var.aval.shape, length) for var in operation.invars]
    results = [_dims(shape, length) for shape, _ in operation.params["results"]]
    flops = 2.0 * query[0] * query[1] * what.length * what.kernel.share * query[2]
    flops *= (query[3] + value[3]) * (_BACKWARD if is_gradient else 1)

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        pairs = zip(operation.params["results"], results, strict=True)
        made = tuple((piece_shape(shape, dims, piece), dtype) for (shape, dtype), dims in pairs)
        return bind(operation, values, results=made)

    sizes = (query[0], query[1], key[2])
    return Factors(tuple(operands), tuple(results), sizes, flops=flops, what=what, local=local)


def rules_cut(operation: Operation) -> Assignment | None:
    """Returns how the active rules cut attention, as the region of `attend` does in a run; None for
    other operations, or without rules. Heads are cut only if key-value heads are.

    Raises:
        PartitionError: If the region would not be manual over all axes of the mesh, as in a run.
    """
    scope = active()
    what = operation.params["what"][0] if operation.name == OPAQUE else None
    if scope is None or not isinstance(what, RowAttention):
        return None
    query, key = (var.aval.shape for var in operation.invars[:2])
    rows, heads, kv_heads = cut_by_rules(scope, query, key)
    shared = what.shares_rows and AXIS in row_axes(scope, what.length)
    cut = {
        ROWS: entry_axes(rows),
        LENGTH: (AXIS,) if shared else (),
        HEADS: entry_axes(heads) if heads == kv_heads else (),
    }
    own = {*entry_axes(rows), *entry_axes(heads), *cut[LENGTH]}
    if not what.by_hand or (shared and what.method != "ulysses"):
        _check_region(operation, own, scope.sizes)
    kept = {f: tuple(a for a in axes if scope.sizes[a] > 1) for f, axes in cut.items()}
    return {factor: axes for factor, axes in kept.items() if axes}


def _check_region(operation: Operation, own: Collection[str], sizes: Sizes) -> None:
    cut = {axis for axis, n in sizes.items() if n > 1}
    if cut.intersection(own) and (left := sorted(cut.difference(own))):
        raise PartitionError(
            f"{partial_region(left)} at {source_of(operation)} cannot be partitioned by shardlib.\n"
            "  Leave the function to XLA, or cut heads over all axes that cut no rows."
        )


def _dims(shape: tuple[int, ...], length: Dim) -> tuple[Dim, ...]:
    """Returns the factors of the dims of an array of heads, of segment ids, or of sinks."""
    return {4: (ROWS, length, HEADS, None), 2: (ROWS, length), 1: (HEADS,)}[len(shape)]
