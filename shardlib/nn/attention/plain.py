"""Attention by two matmuls, which keeps the scores of all pairs of positions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from shardlib.nn.attention.mask import Mask

# Far below any score, and finite: a fully hidden row gives a mean, not NaN.
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


def plain(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    visible: Bool[Array, "#batch length kv_length"] | None,
    mask: Mask,
    bias: Float[Array, "heads length kv_length"] | None = None,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch length heads value_dim"]:
    """Returns attention to the `visible` keys, scored as `mask` says and with `bias` added; see
    `attend` for the others.

    The scores are float32 from the start. The 16-bit operands are widened rather than the result,
    whose gradient would mix dtypes and fail strict promotion.
    """
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    # In this dim order the matmuls read and write the scores in place; any other transposes them.
    query = jnp.transpose(query, (0, 2, 3, 1, 4)).astype(jnp.float32)
    query = mask.scaled(query, head_dim)
    scores = mask.capped(jnp.einsum("bkgtd,bskd->bkgts", query, key.astype(jnp.float32)))
    if bias is not None:
        bias = bias.astype(jnp.float32).reshape(kv_heads, heads // kv_heads, length, -1)
        scores = scores + bias[None]
    if visible is not None:
        # An addition rather than a select: the backward pass then does not read the mask.
        scores = scores + jnp.where(visible, 0.0, _HIDDEN)[:, None, None]
    weights = jax.nn.softmax(scores, axis=-1) if sinks is None else _shared(scores, sinks)
    y = jnp.einsum("bkgts,bskd->bkgtd", weights.astype(value.dtype), value)
    return jnp.transpose(y, (0, 3, 1, 2, 4)).reshape(batch, length, heads, value.shape[-1])


def _shared(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """Returns the softmax of scores [batch, kv_heads, group, length, kv_length], of which the sinks
    of the heads take their part."""
    sinks = sinks.astype(jnp.float32).reshape(1, *scores.shape[1:3], 1, 1)
    peak = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sinks)
    peak = jax.lax.stop_gradient(peak)
    weights = jnp.exp(scores - peak)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - peak))
