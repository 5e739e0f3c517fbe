"""Factors of reductions, of operations along a dim, and of windows."""

import math
from typing import Any

import jax.numpy as jnp

from shardlib.partitioner.factors import Factors, Linear, Reduction, rule
from shardlib.partitioner.shapes import same_dims

_KINDS: dict[str, Reduction] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
def reduce(equation: Any) -> Factors | None:
    """Reduced dims are contracted factors, the others free ones.

    No collective combines the bits of integers, or finds the largest of complex numbers.
    """
    operand = equation.invars[0].aval
    shape, axes = operand.shape, equation.params["axes"]
    kind = _KINDS[equation.primitive.name]
    of_bits = kind in ("and", "or") and operand.dtype != bool
    if of_bits or (kind in ("max", "min") and jnp.issubdtype(operand.dtype, jnp.complexfloating)):
        return reduce_whole(equation)
    linear: Linear = "first" if kind == "sum" else "no"
    return Factors(
        (tuple(range(len(shape))),),
        (tuple(dim for dim in range(len(shape)) if dim not in axes),),
        tuple(shape),
        dict.fromkeys(axes, kind),
        flops=float(math.prod(shape)),
        linear=linear,
    )


@rule("argmax", "argmin", "reduce_prod", "reduce_xor")
def reduce_whole(equation: Any) -> Factors:
    """Reduced dims are whole."""
    shape, axes = equation.invars[0].aval.shape, equation.params["axes"]
    operand = tuple(None if dim in axes else dim for dim in range(len(shape)))
    result = tuple(dim for dim in operand if dim is not None)
    return Factors((operand,), (result,), tuple(shape), flops=float(math.prod(shape)))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(equation: Any) -> Factors:
    return same_dims(equation, {equation.params["axis"]})


@rule("sort")
def sort(equation: Any) -> Factors:
    return same_dims(equation, {equation.params["dimension"]})


@rule("top_k")
def top_k(equation: Any) -> Factors:
    rank = len(equation.invars[0].aval.shape)
    return same_dims(equation, {equation.params.get("axis", -1) % rank})


@rule("fft")
def fft(equation: Any) -> Factors:
    rank = len(equation.invars[0].aval.shape)
    return same_dims(equation, set(range(rank - len(equation.params["fft_lengths"]), rank)))


@rule("cholesky", "lu", "qr", "svd", "eigh", "triangular_solve", "householder_product")
def matrices(equation: Any) -> Factors | None:
    """Stacked matrices have their stack dims as factors; the dims of a matrix are whole."""
    shape = equation.invars[0].aval.shape
    stack = tuple(range(len(shape) - 2))
    if any(var.aval.shape[: len(stack)] != shape[:-2] for var in equation.invars):
        return None
    every = (*equation.invars, *equation.outvars)
    if any(var.aval.shape[: len(stack)] != shape[:-2] for var in every):
        return None

    def of(var: Any) -> tuple[int | None, ...]:
        return stack + (None,) * (len(var.aval.shape) - len(stack))

    operands, results = map(of, equation.invars), map(of, equation.outvars)
    return Factors(tuple(operands), tuple(results), tuple(shape[:-2]))


@rule(
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_gather_add",
    "select_and_scatter_add",
)
def window(equation: Any) -> Factors:
    """A dim is a factor if no window spans, pads, strides over or dilates it."""
    params = equation.params
    held = set()
    for name, plain in (
        ("window_dimensions", 1),
        ("window_strides", 1),
        ("base_dilation", 1),
        ("window_dilation", 1),
    ):
        held |= {dim for dim, n in enumerate(params.get(name) or ()) if n != plain}
    held |= {dim for dim, pair in enumerate(params["padding"]) if tuple(pair) != (0, 0)}
    return same_dims(equation, held)
