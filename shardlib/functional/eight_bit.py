"""Matrix products of 8-bit operands, for training.

Both operands of a product are divided by a scale, which maps their largest magnitude to the largest
number of an 8-bit format, and rounded. The product accumulates in 32 bits and is multiplied by both
scales. The scales come from the operands themselves ("current" scaling), so that a state holds none
of them, and they are the same on every mesh: the maximum of a cut tensor is that of the whole one.
The gradients of a product are two more products, of the gradient of its result.

- `fp8_dot_general`: one scale for a tensor, a power of two, so that scaling rounds nothing and sums
  of devices travel in the dtype of the layer. Operands are e4m3, gradients e5m2, whose range is
  wider (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). For NVIDIA GPUs since Hopper
  and Ada.
- `int8_dot_general`: one scale for each row and column of a product, which is exact since a scale
  does not vary along a sum (Abdolrashidi et al. 2021, "Pareto-Optimal Quantized ResNet Is Mostly
  4-bit", section 3). The gradient of the weights is computed in the dtype of the operands: it
  sums over tokens, of which a few have gradients much larger than the others (Wortsman et al. 2023,
  "Stable and low-precision training for large-scale vision-language models", section 2.2). For
  TPUs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from shardlib.errors import ModelError

RESULT = "eight_bit_dot"
"""The name, as of `checkpoint_name`, of the results of 8-bit products."""
Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
"""`((lhs contracted, rhs contracted), (lhs batch, rhs batch))`, as in `jax.lax.dot_general`."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a product and its gradients are rounded."""

    operand: Any
    """8-bit dtype of the operands."""
    gradient: Any
    """8-bit dtype of the gradient of the result."""
    accumulator: Any
    """Dtype of the results of products; None for the dtype of the layer. Sums are in 32 bits."""
    per_channel: bool
    """Whether each row and column of a product has its own scale. Else a tensor has one, which is a
    power of two."""
    exact_weights: bool
    """Whether the gradient of the second operand is computed without rounding."""


FP8 = Recipe(jnp.float8_e4m3fn, jnp.float8_e5m2, None, False, False)
INT8 = Recipe(jnp.int8, jnp.int8, jnp.int32, True, True)


def fp8_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: lax.DotDimensionNumbers, **options: Any
) -> jax.Array:
    """Returns `jax.lax.dot_general` of operands in float8; see the module.

    Args:
        lhs: Activations, of any floating dtype.
        rhs: Weights of the same dtype.
        dimension_numbers: As of `jax.lax.dot_general`.
        options: `precision`, which has no effect, and `preferred_element_type`, the dtype of the
            result; by default it is the dtype of the operands.

    Raises:
        ModelError: If there are other options.
    """
    return _dot(FP8, lhs, rhs, dimension_numbers, **options)


def int8_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: lax.DotDimensionNumbers, **options: Any
) -> jax.Array:
    """Returns `jax.lax.dot_general` of operands in int8; as `fp8_dot_general`."""
    return _dot(INT8, lhs, rhs, dimension_numbers, **options)


def _dot(
    recipe: Recipe,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: object = None,
    preferred_element_type: DTypeLike | None = None,
    **others: Any,
) -> jax.Array:
    given = sorted(name for name, value in others.items() if value is not None)
    if given:
        raise ModelError(
            f"a matmul in {jnp.dtype(recipe.operand)} has the options {', '.join(given)}, which it "
            "does not know.\n  Leave them out, or give the layer a dot_general of its own."
        )
    del precision
    (left, right), (left_batch, right_batch) = dimension_numbers
    dims = (tuple(left), tuple(right)), (tuple(left_batch), tuple(right_batch))
    out = jnp.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
    return _product(recipe, dims, out, lhs, rhs)


def _forward(
    recipe: Recipe, dims: Dims, out: np.dtype, lhs: jax.Array, rhs: jax.Array
) -> jax.Array:
    y = _rounded(recipe, dims, out, lhs, rhs, recipe.operand, recipe.operand)
    return checkpoint_name(y, RESULT)


_product = jax.custom_vjp(_forward, nondiff_argnums=(0, 1, 2))


def _forward_rule(recipe: Recipe, dims: Dims, out: np.dtype, lhs: jax.Array, rhs: jax.Array) -> Any:
    return _forward(recipe, dims, out, lhs, rhs), (lhs, rhs)


def _backward_rule(
    recipe: Recipe,
    dims: Dims,
    out: np.dtype,
    kept: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> Any:
    del out
    lhs, rhs = kept
    turned = (dims[0][1], dims[0][0]), (dims[1][1], dims[1][0])
    of_lhs = _of_first(recipe, dims, lhs.ndim, gradient, rhs, first=True)
    of_rhs = _of_first(recipe, turned, rhs.ndim, gradient, lhs, first=False)
    return of_lhs.astype(lhs.dtype), of_rhs.astype(rhs.dtype)


_product.defvjp(_forward_rule, _backward_rule)


def _of_first(
    recipe: Recipe, dims: Dims, rank: int, gradient: jax.Array, other: jax.Array, *, first: bool
) -> jax.Array:
    """Returns the gradient of one operand from the gradient of the result and the other operand. In
    `dims` this operand, with `rank` dims, is the first; `first` says whether it is so in the
    product."""
    (mine, theirs), (batch, other_batch) = dims
    own = [dim for dim in range(rank) if dim not in (*mine, *batch)]
    free = [dim for dim in range(other.ndim) if dim not in (*theirs, *other_batch)]
    # Dims of the result are the batch, the free dims of its first operand, and of its second.
    start = len(batch) + (len(own) if first else 0)
    summed = tuple(range(start, start + len(free)))
    numbers = (summed, tuple(free)), (tuple(range(len(batch))), other_batch)
    if recipe.exact_weights and not first:
        y = lax.dot_general(gradient.astype(other.dtype), other, numbers)
    else:
        dtypes = recipe.gradient, recipe.operand
        y = _rounded(recipe, numbers, gradient.dtype, gradient, other, *dtypes)
    # Dims of `y` are the batch, the free dims of the operand, and its contracted dims in the order
    # of the other operand.
    by_other = [mine[i] for i in sorted(range(len(theirs)), key=lambda i: theirs[i])]
    order = [*batch, *own, *by_other]
    return jnp.transpose(y, [order.index(dim) for dim in range(rank)])


def _rounded(
    recipe: Recipe,
    dims: Dims,
    out: np.dtype,
    lhs: jax.Array,
    rhs: jax.Array,
    left: DTypeLike,
    right: DTypeLike,
) -> jax.Array:
    """Returns the product of rounded operands in the dtype `out`."""
    (left_sum, right_sum), (left_batch, right_batch) = dims
    x, of_x = _quantized(recipe, lhs, left, left_sum)
    w, of_w = _quantized(recipe, rhs, right, right_sum)
    y = lax.dot_general(x, w, dims, preferred_element_type=recipe.accumulator or out)
    y = y.astype(jnp.float32)
    if not recipe.per_channel:
        return (y * (of_x * of_w)).astype(out)
    # Scales have dims of size 1 where their operand is contracted: multiplied with `dims`, they
    # have the shape of the result.
    free_x = [dim for dim in range(lhs.ndim) if dim not in (*left_sum, *left_batch)]
    free_w = [dim for dim in range(rhs.ndim) if dim not in (*right_sum, *right_batch)]
    num_batch = len(left_batch)
    rows = jnp.transpose(of_x, (*left_batch, *free_x, *left_sum))
    columns = jnp.transpose(of_w, (*right_batch, *free_w, *right_sum))
    rows = rows.reshape(*y.shape[: num_batch + len(free_x)], *(1 for _ in free_w))
    columns = columns.reshape(
        *y.shape[:num_batch], *(1 for _ in free_x), *y.shape[num_batch + len(free_x) :]
    )
    return (y * rows * columns).astype(out)


def _quantized(
    recipe: Recipe, x: jax.Array, dtype: DTypeLike, contracted: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns a tensor in an 8-bit dtype and the float32 scale that it is to be multiplied by."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    largest = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    magnitude = jnp.abs(x).astype(jnp.float32)
    peak = jnp.max(
        magnitude,
        axis=contracted if recipe.per_channel else None,
        keepdims=recipe.per_channel,
    )
    scale = peak / largest
    if not recipe.per_channel:
        mantissa, exponent = jnp.frexp(scale)
        scale = jnp.ldexp(jnp.float32(1), exponent - (mantissa == 0.5).astype(jnp.int32))
    scale = jnp.where(peak > 0, scale, 1.0)
    scaled = x.astype(jnp.float32) / scale
    scaled = jnp.round(scaled) if is_integer else scaled
    # Division may round past the largest number.
    return jnp.clip(scaled, -largest, largest).astype(dtype), scale
