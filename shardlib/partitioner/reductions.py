"""Factors of reductions, of operations along a dim, and of windows."""

import math

import jax.numpy as jnp

from shardlib.jaxprs import Operation
from shardlib.partitioner.factors import Factors, Linear, Reduction, overflows, rule
from shardlib.partitioner.shapes import same_dims

_KINDS: dict[str, Reduction] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}


@rule("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
def reduce(operation: Operation) -> Factors | None:
    """Reduced dims are contracted factors, the others free ones.

    No collective combines the bits of integers, or finds the largest of complex numbers.
    """
    operand = operation.invars[0].aval
    shape, axes = operand.shape, operation.params["axes"]
    kind = _KINDS[operation.name]
    of_bits = kind in ("and", "or") and operand.dtype != bool
    if of_bits or (kind in ("max", "min") and jnp.issubdtype(operand.dtype, jnp.complexfloating)):
        return reduce_whole(operation)
    every = tuple(range(len(shape)))
    kept = tuple(dim for dim in every if dim not in axes)
    linear: Linear = "first" if kind == "sum" and not overflows(operand.dtype) else "no"
    reduced: dict[int, Reduction] = dict.fromkeys(axes, kind)
    flops = float(math.prod(shape))
    return Factors((every,), (kept,), tuple(shape), reduced, flops, linear)


@rule("argmax", "argmin", "reduce_prod", "reduce_xor")
def reduce_whole(operation: Operation) -> Factors:
    """Reduced dims are whole."""
    shape, axes = operation.invars[0].aval.shape, operation.params["axes"]
    operand = tuple(None if dim in axes else dim for dim in range(len(shape)))
    result = tuple(dim for dim in operand if dim is not None)
    return Factors((operand,), (result,), tuple(shape), flops=float(math.prod(shape)))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(operation: Operation) -> Factors:
    return same_dims(operation, {operation.params["axis"]})


@rule("sort")
def sort(operation: Operation) -> Factors:
    return same_dims(operation, {operation.params["dimension"]})


@rule("top_k")
def top_k(operation: Operation) -> Factors:
    rank = len(operation.invars[0].aval.shape)
    return same_dims(operation, {operation.params.get("axis", -1) % rank})


@rule("fft")
def fft(operation: Operation) -> Factors:
    rank = len(operation.invars[0].aval.shape)
    return same_dims(operation, set(range(rank - len(operation.params["fft_lengths"]), rank)))


@rule("cholesky", "lu", "qr", "svd", "eigh", "triangular_solve", "householder_product")
def matrices(operation: Operation) -> Factors | None:
    """Stacked matrices have their stack dims as factors; the dims of a matrix are whole."""
    shape = operation.invars[0].aval.shape
    stack = tuple(range(len(shape) - 2))
    every = (*operation.invars, *operation.outvars)
    if any(var.aval.shape[: len(stack)] != shape[:-2] for var in every):
        return None

    dims = [stack + (None,) * (len(var.aval.shape) - len(stack)) for var in every]
    count = len(operation.invars)
    return Factors(tuple(dims[:count]), tuple(dims[count:]), tuple(shape[:-2]))


@rule(
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_gather_add",
    "select_and_scatter_add",
)
def window(operation: Operation) -> Factors:
    """A dim is a factor if no window spans, pads, strides over or dilates it."""
    params = operation.params
    held = set()
    for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation"):
        held |= {dim for dim, n in enumerate(params.get(name) or ()) if n != 1}
    held |= {dim for dim, pair in enumerate(params["padding"]) if tuple(pair) != (0, 0)}
    return same_dims(operation, held)
