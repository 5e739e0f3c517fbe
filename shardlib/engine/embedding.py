"""Embeddings of prompts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def embeddings(
    features: Callable[[], Float[Array, "groups rows features"]], is_wanted: Bool[Array, ""]
) -> Float[Array, "groups rows features"]:
    """Returns features as float32 vectors of length 1. `features` computes them for rows, in any
    floating-point dtype, if any request wants its embedding; otherwise they are 0."""

    def units() -> jax.Array:
        x = features().astype(jnp.float32)
        lengths = jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x / jnp.maximum(lengths, jnp.finfo(jnp.float32).tiny)

    zeros = jnp.zeros(jax.eval_shape(features).shape, jnp.float32)
    return jax.lax.cond(is_wanted, units, lambda: zeros)
