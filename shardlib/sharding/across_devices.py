"""Maximum, minimum, and, or of values across devices, inside a manual region."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Extreme = Literal["max", "min", "and", "or"]


def extreme(x: jax.Array, kind: Extreme, axes: Sequence[str]) -> jax.Array:
    """Returns the elementwise extreme of the devices' values along mesh axes: of real numbers,
    where NaN is both the largest and the smallest, or of booleans for `and` and `or`."""
    axes = tuple(axes)
    if kind in ("and", "or"):
        join = lax.pmin if kind == "and" else lax.pmax
        return join(x.astype(jnp.uint8), axes).astype(x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (lax.pmax if kind == "max" else lax.pmin)(x, axes)
    # All-reduces of floats drop NaN on some platforms. All-reduces of integers in the same order,
    # with NaN as the largest, do not.
    wide = (x if kind == "max" else -x).astype(
        jnp.float64 if x.dtype.itemsize == 8 else jnp.float32
    )
    top = _floats(lax.pmax(_integers(wide), axes)).astype(x.dtype)
    return top if kind == "max" else -top


def _integers(x: jax.Array) -> jax.Array:
    """Returns integers in the order of 32-bit or 64-bit floats."""
    x = jnp.where(jnp.isnan(x), jnp.nan, x)  # removes the sign
    return _turned(lax.bitcast_convert_type(x, jnp.int32 if x.dtype.itemsize == 4 else jnp.int64))


def _floats(number: jax.Array) -> jax.Array:
    is_short = number.dtype.itemsize == 4
    return lax.bitcast_convert_type(_turned(number), jnp.float32 if is_short else jnp.float64)


def _turned(bits: jax.Array) -> jax.Array:
    """Reverses the order of the bits of negative floats. It is its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)
