"""Matmuls that one device runs for the products of a traced program."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from shardlib.cost.machine.kernels import Product
from shardlib.cost.traced.layout import Laid, Spreading
from shardlib.cost.traced.rules import product_layout
from shardlib.jaxprs import Operation

PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"))
"""Primitives that multiply matrices."""


def product(
    spread: Spreading, operation: Operation, ins: list[Laid], outs: Sequence[Laid]
) -> Product:
    """Returns the matmul that one device runs for one of `PRODUCTS`.

    Args:
        spread: The mesh.
        operation: The product or convolution.
        ins: Layouts of its operands.
        outs: Layouts of its results.
    """
    avals = [var.aval for var in operation.invars[:2]]
    out = operation.outvars[0].aval
    if operation.name not in ("dot_general", "conv_general_dilated"):
        return _ragged(spread, avals, ins, out, outs[0])
    silent = dataclasses.replace(spread, moved=lambda _: None)
    _, taken = product_layout(silent, operation, ins)
    made = spread.num_bytes(out, outs[0])
    pairs = zip(avals, taken, strict=True)
    moved = made + sum(spread.num_bytes(aval, laid) for aval, laid in pairs)
    numbers, width = made / out.dtype.itemsize, avals[0].dtype.itemsize
    params = operation.params
    if operation.name == "dot_general":
        (dims, _), (batch, _) = params["dimension_numbers"]
        shape = _local(spread, avals[0], taken[0])
        fan_in = math.prod(shape[d] for d in dims)
        groups = math.prod(shape[d] for d in batch)
        rows = math.prod(shape) / max(fan_in * groups, 1)
        return Product(rows, fan_in, numbers / max(rows * groups, 1), groups, moved, width)
    numbering = params["dimension_numbers"]
    kernel = _local(spread, avals[1], taken[1])
    useful = math.prod(params["lhs_dilation"])
    fan_in = math.prod(kernel[d] for d in numbering.rhs_spec[1:]) / useful
    fan_out = _local(spread, out, outs[0])[numbering.out_spec[1]]
    return Product(numbers / fan_out, fan_in, fan_out, 1.0, moved, width)


def _ragged(
    spread: Spreading, avals: Sequence[Any], ins: Sequence[Laid], out: Any, laid: Laid
) -> Product:
    """Returns a product in which each row multiplies the matrix of its group."""
    held = sum(spread.num_bytes(a, one) for a, one in zip(avals, ins, strict=False))
    made = spread.num_bytes(out, laid)
    rows, fan_in = _local(spread, avals[0], ins[0])[-2:]
    fan_out = made / out.dtype.itemsize / rows
    return Product(rows, fan_in, fan_out, 1.0, held + made, out.dtype.itemsize)


def _local(spread: Spreading, aval: Any, laid: Laid) -> list[float]:
    return [n / spread.shards(axes) for n, axes in zip(aval.shape, laid.spec, strict=True)]
