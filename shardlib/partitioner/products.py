"""Factors of matrix products and convolutions."""

import math

from shardlib.jaxprs import Operation
from shardlib.partitioner.factors import (
    Arrays,
    DevicePiece,
    Dim,
    FactorList,
    Factors,
    Reduction,
    bind,
    rule,
)


@rule("dot_general")
def dot_general(operation: Operation) -> Factors:
    """Batch dims and free dims are factors of the result; contracted dims are summed."""
    (left_sum, right_sum), (left_batch, right_batch) = operation.params["dimension_numbers"]
    left, right = (var.aval.shape for var in operation.invars)
    dims: tuple[list[Dim], list[Dim]] = [None] * len(left), [None] * len(right)
    factors, result = FactorList(), list[Dim]()
    sums: dict[int, Reduction] = {}
    for i, j in zip(left_batch, right_batch, strict=True):
        dims[0][i] = dims[1][j] = factors.new(left[i])
        result.append(dims[0][i])
    for i, j in zip(left_sum, right_sum, strict=True):
        dims[0][i] = dims[1][j] = factors.new(left[i], sums)
    for operand, shape in zip(dims, (left, right), strict=True):
        for dim, factor in enumerate(operand):
            if factor is None:
                operand[dim] = factors.new(shape[dim])
                result.append(operand[dim])
    if operation.outvars[0].aval.dtype == bool:
        sums = dict.fromkeys(sums, "or")
    operands, flops = tuple(map(tuple, dims)), 2.0 * math.prod(factors)
    return Factors(operands, (tuple(result),), tuple(factors), sums, flops)


@rule("conv_general_dilated")
def convolution(operation: Operation) -> Factors:
    """Factors are the batch, the output features and, without groups, the input features.

    Groups are one factor of both features, cut into whole groups. Image dims are whole: their
    pieces would have to exchange borders.
    """
    numbers = operation.params["dimension_numbers"]
    feature_groups = operation.params["feature_group_count"]
    batch_groups = operation.params["batch_group_count"]
    image, kernel = (var.aval.shape for var in operation.invars)
    out = operation.outvars[0].aval.shape
    dims: tuple[list[Dim], ...] = [None] * len(image), [None] * len(kernel), [None] * len(out)
    (batch, feature), (made, taken) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    at = {"image": (0, batch), "feature": (0, feature), "made": (1, made), "taken": (1, taken)}
    at |= {"out_batch": (2, numbers.out_spec[0]), "out_feature": (2, numbers.out_spec[1])}
    summed: tuple[int, ...] = ()
    if feature_groups > 1:
        joined = (("image", "out_batch"), ("feature", "made", "out_feature"))
        sizes = (image[batch], feature_groups)
    elif batch_groups > 1:
        joined = (("feature", "taken"), ("image", "made", "out_feature"))
        sizes, summed = (image[feature], batch_groups), (0,)
    else:
        joined = (("image", "out_batch"), ("made", "out_feature"), ("feature", "taken"))
        sizes, summed = (image[batch], kernel[made], image[feature]), (2,)
    for factor, names in enumerate(joined):
        for name in names:
            operand, dim = at[name]
            dims[operand][dim] = factor

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        groups = {}
        if feature_groups > 1:
            groups["feature_group_count"] = feature_groups // piece.parts(1)
        if batch_groups > 1:
            groups["batch_group_count"] = batch_groups // piece.parts(1)
        return bind(operation, values, **groups)

    flops = 2.0 * math.prod(out) * math.prod(n for dim, n in enumerate(kernel) if dim != made)
    operands = tuple(dims[0]), tuple(dims[1])
    reduced: dict[int, Reduction] = dict.fromkeys(summed, "sum")
    return Factors(operands, (tuple(dims[2]),), sizes, reduced, flops, local=local)


@rule("ragged_dot_general")
def ragged_dot_general(operation: Operation) -> Factors | None:
    """In `[m, k] @ [g, k, n]` with rows m in g ragged groups, n is free and k contracted. Rows and
    groups are whole, since the start of a group depends on all groups before it."""
    numbers = operation.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, _) = numbers.dot_dimension_numbers
    left, right, _ = (var.aval.shape for var in operation.invars)
    ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    plain = len(left) == 2 and len(right) == 3 and not left_batch
    if not plain or len(group) != 1 or ragged[0] in left_sum:
        return None
    (k_left,), (k_right,) = left_sum, right_sum
    free = next(d for d in range(3) if d not in (k_right, group[0]))
    first: list[Dim] = [None, None]
    second: list[Dim] = [None, None, None]
    first[k_left] = second[k_right] = 0
    second[free] = 1
    return Factors(
        (tuple(first), tuple(second), (None,)),
        ((None, 1),),
        (left[k_left], right[free]),
        {0: "sum"},
        flops=2.0 * math.prod(left) * right[free],
    )
