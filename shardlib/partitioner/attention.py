"""Factors of attention that is traced as one operation."""

from shardlib.jaxprs import Operation
from shardlib.nn.attention.as_one import RowAttention
from shardlib.partitioner.factors import (
    Arrays,
    DevicePiece,
    Dim,
    Factors,
    bind,
    piece_shape,
    rule,
)
from shardlib.sharding.shared_rows import OPAQUE

ROWS, LENGTH, HEADS = 0, 1, 2
"""The factors of attention. Devices that cut the length share rows by a method of `attend`."""
_BACKWARD = 2.5
"""Products of the gradient for each of attention, as in `cost.machine.kernels.FusedAttention`."""


@rule(OPAQUE)
def attention(operation: Operation) -> Factors | None:
    """Rows, positions and key-value heads are factors of all operands. The gradient of sinks is a
    sum over rows and positions, and other gradients are not: with sinks it is whole."""
    what, _ = operation.params["what"]
    if not isinstance(what, RowAttention):
        return None
    query, key, value = (var.aval.shape for var in operation.invars[:3])
    is_gradient = operation.params["linear"]
    operands = [_dims(var.aval.shape) for var in operation.invars]
    results = [_dims(shape) for shape, _ in operation.params["results"]]
    if is_gradient and (HEADS,) in results:
        return None
    flops = 2.0 * query[0] * query[1] * what.length * what.kernel.share * query[2]
    flops *= (query[3] + value[3]) * (_BACKWARD if is_gradient else 1)

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        pairs = zip(operation.params["results"], results, strict=True)
        made = tuple((piece_shape(shape, dims, piece), dtype) for (shape, dtype), dims in pairs)
        return bind(operation, values, results=made)

    sizes = (query[0], query[1], key[2])
    return Factors(tuple(operands), tuple(results), sizes, flops=flops, what=what, local=local)


def _dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
    """Returns the factors of the dims of an array of heads, of segment ids, or of sinks."""
    return {4: (ROWS, LENGTH, HEADS, None), 2: (ROWS, LENGTH), 1: (HEADS,)}[len(shape)]
