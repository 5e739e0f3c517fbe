"""Permutation of token rows into expert order and back.

Both directions are gathers, forward and backward. The derivative of a gather would be a
scatter-add, which is slow because rows may collide; here they cannot.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from shardlib.nn.remat import tag


def _take(rows: jax.Array, at: jax.Array) -> jax.Array:
    """Returns `rows[at]`, with zeros where `at` is beyond the last row."""
    return rows.at[at].get(mode="fill", fill_value=0)


@jax.custom_vjp
def spread(
    tokens: Shaped[Array, "tokens embed"],
    source: Int[Array, " rows"],
    place: Int[Array, "tokens k"],
) -> Shaped[Array, "rows embed"]:
    """Returns rows [n, d]: row i is the token of the copy `source[i]`.

    Copy c of `tokens` [t, d] is token `c // k`. `place` [t, k] int32 is the row of each copy and
    must agree with `source` [n] int32. A copy without a row has a place of n or more. A row without
    a copy is zero and has a source of t * k or more.
    """
    return _take(tokens, source // place.shape[1])


def _spread_forward(
    tokens: jax.Array, source: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return spread(tokens, source, place), place


def _spread_backward(place: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return jax.lax.reduce_sum(_take(gradient, place), axes=(1,)), None, None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(
    rows: Shaped[Array, "rows embed"], source: Int[Array, " rows"], place: Int[Array, "tokens k"]
) -> Shaped[Array, "tokens k embed"]:
    """Returns the copies [t, k, d] from `rows` [n, d], with zeros for copies without a row.

    `source` and `place` are as in `spread`.
    """
    return _take(rows, place)


def _collect_forward(
    rows: jax.Array, source: jax.Array, place: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return collect(rows, source, place), source


def _collect_backward(source: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    return _take(gradient.reshape(-1, gradient.shape[-1]), source), None, None


collect.defvjp(_collect_forward, _collect_backward)


def weighted_sum(
    results: Float[Array, "tokens k embed"], weights: Float[Array, "tokens k"]
) -> Float[Array, "tokens embed"]:
    """Returns results [t, k, d] summed over k by `weights` [t, k] float32: [t, d].

    The sum is in float32, the result in the dtype of `results`.
    """
    results = tag(results, "moe_results")
    total = jnp.sum(results.astype(jnp.float32) * weights[..., None], axis=1)
    return total.astype(results.dtype)
