"""Factors of matrix products and convolutions."""

import math
from typing import Any

from shardlib.partitioner.factors import Cut, Dim, Factors, bind, rule


@rule("dot_general")
def dot_general(equation: Any) -> Factors:
    """Batch dims and free dims are factors of the result; contracted dims are summed."""
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left, right = (var.aval.shape for var in equation.invars)
    dims: tuple[list[Dim], list[Dim]] = [None] * len(left), [None] * len(right)
    sizes: list[int] = []
    result: list[Dim] = []

    def pair(i: int, j: int) -> int:
        dims[0][i] = dims[1][j] = len(sizes)
        sizes.append(left[i])
        return len(sizes) - 1

    result += [pair(i, j) for i, j in zip(left_batch, right_batch, strict=True)]
    summed = [pair(i, j) for i, j in zip(left_sum, right_sum, strict=True)]
    for operand, shape in zip(dims, (left, right), strict=True):
        for dim, factor in enumerate(operand):
            if factor is None:
                operand[dim] = len(sizes)
                result.append(len(sizes))
                sizes.append(shape[dim])
    return Factors(
        tuple(map(tuple, dims)),
        (tuple(result),),
        tuple(sizes),
        dict.fromkeys(summed, "sum"),
        flops=2.0 * math.prod(sizes),
    )


@rule("conv_general_dilated")
def convolution(equation: Any) -> Factors:
    """Factors are the batch, the output features and, without groups, the input features.

    Groups are one factor of both features, cut into whole groups. Image dims are whole: their
    pieces would have to exchange borders.
    """
    numbers = equation.params["dimension_numbers"]
    feature_groups = equation.params["feature_group_count"]
    batch_groups = equation.params["batch_group_count"]
    image, kernel = (var.aval.shape for var in equation.invars)
    out = equation.outvars[0].aval.shape
    dims: tuple[list[Dim], ...] = [None] * len(image), [None] * len(kernel), [None] * len(out)
    (batch, feature), (made, taken) = numbers.lhs_spec[:2], numbers.rhs_spec[:2]
    at = {"image": (0, batch), "feature": (0, feature), "made": (1, made), "taken": (1, taken)}
    at |= {"out_batch": (2, numbers.out_spec[0]), "out_feature": (2, numbers.out_spec[1])}
    if feature_groups > 1:
        joined = (("image", "out_batch"), ("feature", "made", "out_feature"))
        sizes, reduced = (image[batch], feature_groups), {}
    elif batch_groups > 1:
        joined = (("feature", "taken"), ("image", "made", "out_feature"))
        sizes, reduced = (image[feature], batch_groups), {0: "sum"}
    else:
        joined = (("image", "out_batch"), ("made", "out_feature"), ("feature", "taken"))
        sizes, reduced = (image[batch], kernel[made], image[feature]), {2: "sum"}
    for factor, names in enumerate(joined):
        for name in names:
            operand, dim = at[name]
            dims[operand][dim] = factor

    def local(equation: Any, values: list[Any], cut: Cut) -> Any:
        groups = {}
        if feature_groups > 1:
            groups["feature_group_count"] = feature_groups // cut.parts(1)
        if batch_groups > 1:
            groups["batch_group_count"] = batch_groups // cut.parts(1)
        return bind(equation, values, **groups)

    flops = 2.0 * math.prod(out) * math.prod(kernel) / kernel[made]
    operands = tuple(dims[0]), tuple(dims[1])
    return Factors(operands, (tuple(dims[2]),), sizes, reduced, flops, local=local)  # type: ignore[arg-type]


@rule("ragged_dot_general")
def ragged_dot_general(equation: Any) -> Factors | None:
    """In `[m, k] @ [g, k, n]` with rows m in g ragged groups, n is free and k contracted. Rows and
    groups are whole, since the start of a group depends on all groups before it."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, _) = numbers.dot_dimension_numbers
    left, right, _ = (var.aval.shape for var in equation.invars)
    ragged, group = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    plain = len(left) == 2 and len(right) == 3 and not left_batch
    if not plain or len(group) != 1 or ragged[0] in left_sum:
        return None
    (k_left,), (k_right,) = left_sum, right_sum
    free = next(d for d in range(3) if d not in (k_right, group[0]))
    first, second = [None, None], [None, None, None]
    first[k_left] = second[k_right] = 0  # type: ignore[call-overload]
    second[free] = 1  # type: ignore[call-overload]
    return Factors(
        (tuple(first), tuple(second), (None,)),
        ((None, 1),),
        (left[k_left], right[free]),
        {0: "sum"},
        flops=2.0 * math.prod(left) * right[free],
    )
