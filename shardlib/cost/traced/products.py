"""Matmuls that one device runs for the products of a traced program."""

import dataclasses
import math
from collections.abc import Sequence

from shardlib.cost.machine.kernels import Product
from shardlib.cost.traced.layout import Aval, Equation, Spreading, ValueSharding
from shardlib.cost.traced.primitives import product_layout
from shardlib.jaxprs import Operation

RAGGED = ("ragged_dot", "ragged_dot_general")
PRODUCTS = frozenset(("dot_general", "conv_general_dilated", *RAGGED))
"""Primitives that multiply matrices."""
Shape = Sequence[float]


def product(
    spread: Spreading, operation: Operation, ins: list[ValueSharding], outs: Sequence[ValueSharding]
) -> Product:
    """Returns the matmul that one device runs for one of `PRODUCTS`."""
    avals = [var.aval for var in operation.invars[:2]]
    out = operation.outvars[0].aval
    taken = ins[:2]
    if operation.name not in RAGGED:
        silent = dataclasses.replace(spread, moved=lambda _: None)
        _, taken = product_layout(silent, operation, ins)
    made = spread.num_bytes(out, outs[0])
    pairs = list(zip(avals, taken, strict=True))
    moved = made + sum(spread.num_bytes(aval, laid) for aval, laid in pairs)
    shapes = [_local(spread, aval, laid) for aval, laid in (*pairs, (out, outs[0]))]
    width = (out if operation.name in RAGGED else avals[0]).dtype.itemsize
    return Product(*_dims(operation, *shapes), moved, width)


def matmul_flops(equation: Equation) -> float | None:
    """Returns the FLOPs of a matmul or convolution by its shapes, else None.

    A multiply-add is two FLOPs. A ragged matmul multiplies each row by the weights of its group.
    Rows without a group are counted too, because their number depends on the data. A convolution
    has its whole window for each output despite padding.
    """
    if equation.primitive.name not in PRODUCTS:
        return None
    variables = (*equation.invars[:2], equation.outvars[0])
    return 2.0 * math.prod(_dims(equation, *(variable.aval.shape for variable in variables)))


def _dims(
    equation: Equation, lhs: Shape, rhs: Shape, out: Shape
) -> tuple[float, float, float, float]:
    """Returns rows, fan-in, fan-out and number of groups of a product of the given shapes."""
    params, name = equation.params, equation.primitive.name
    if name == "dot_general":
        (dims, _), (batch, _) = params["dimension_numbers"]
        fan_in, groups = (math.prod(lhs[d] for d in some) for some in (dims, batch))
        rows = math.prod(lhs) / max(fan_in * groups, 1)
        return rows, fan_in, math.prod(out) / max(rows * groups, 1), groups
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        useful = math.prod(params["lhs_dilation"] or (1,))
        fan_in = math.prod(rhs[d] for d in numbers.rhs_spec[1:]) / useful
        fan_out = out[numbers.out_spec[1]]
        return math.prod(out) / max(fan_out, 1), fan_in, fan_out, 1.0
    numbers = params.get("ragged_dot_dimension_numbers")
    free = rhs[-1:]
    if numbers is not None:
        (_, contracted), (_, batch) = numbers.dot_dimension_numbers
        given = {*numbers.rhs_group_dimensions, *contracted, *batch}
        free = [size for dim, size in enumerate(rhs) if dim not in given]
    return lhs[-2], lhs[-1], math.prod(free), math.prod(lhs[:-2])


def _local(spread: Spreading, aval: Aval, laid: ValueSharding) -> list[float]:
    return [n / spread.shards(axes) for n, axes in zip(aval.shape, laid.spec, strict=True)]
