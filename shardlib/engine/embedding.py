"""Embeddings of prompts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def embeddings(
    features: Callable[[], Float[Array, "groups rows features"]], is_wanted: Bool[Array, ""]
) -> Float[Array, "groups rows features"]:
    """Returns features as float32 vectors of length 1.

    Args:
        features: Computes the features of rows, in any floating-point dtype. It runs if they are
            wanted.
        is_wanted: Whether any request wants its embedding; otherwise they are 0.
    """

    def units() -> jax.Array:
        return unit(features())

    zeros = jnp.zeros(jax.eval_shape(features).shape, jnp.float32)
    return jax.lax.cond(is_wanted, units, lambda: zeros)


def unit(x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
    """Returns vectors in float32, divided by their lengths."""
    x = x.astype(jnp.float32)
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
