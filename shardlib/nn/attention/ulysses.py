"""Ulysses attention: two all-to-alls exchange shards of the row for shards of the heads.

Between them each device has the whole row for some of the heads, so any backend can compute it.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from shardlib.nn.attention.blockwise import Segments
from shardlib.nn.attention.order import AXIS, Order, chunk_order, take_chunks

Local = Callable[[jax.Array, jax.Array, jax.Array, Segments, jax.Array | None], jax.Array]


def ulysses_attention(
    local: Local,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads value_dim"],
    segments: Segments = (None, None),
    sinks: Float[Array, " heads"] | None = None,
    *,
    order: Order,
) -> Float[Array, "batch length heads value_dim"]:
    """Returns attention over the whole row; call it in a region that is manual over `context`.

    Args:
        local: Attention of (query, key, value, segments) on whole rows in contiguous order.
        query: [batch, length, heads, head_dim]; heads are a multiple of the size of the axis.
        key: [batch, length, kv_heads, head_dim]; if the axis does not divide kv_heads, each device
            gets a copy of the key-value heads that its query heads share.
        value: As `key`.
        segments: [batch, length] int32 of queries and of keys, or None.
        order: Order of the row over the axis.
    """
    shards = jax.lax.axis_size(AXIS)
    needed = kv_heads_of(query.shape[2], key.shape[2], shards).reshape(-1)
    if len(needed) != key.shape[2]:
        key, value = (jnp.take(x, needed, axis=2, mode="clip") for x in (key, value))
    chunks = chunk_order(shards) if order == "zigzag" else np.arange(shards)

    def whole_row(x: jax.Array) -> jax.Array:
        x = jax.lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True)
        return take_chunks(x, 1, np.argsort(chunks))

    def ids(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        return take_chunks(jax.lax.all_gather(x, AXIS, axis=1, tiled=True), 1, np.argsort(chunks))

    rows = whole_row(query), whole_row(key), whole_row(value)
    if sinks is not None:
        here = query.shape[2] // shards
        sinks = jax.lax.dynamic_slice_in_dim(sinks, jax.lax.axis_index(AXIS) * here, here)
    y = local(*rows, (ids(segments[0]), ids(segments[1])), sinks)
    return jax.lax.all_to_all(
        take_chunks(y, 1, chunks), AXIS, split_axis=1, concat_axis=2, tiled=True
    )


def kv_heads_of(heads: int, kv_heads: int, shards: int) -> np.ndarray:
    """Returns the key-value heads that each shard of the query heads needs: [shards, n] int.

    The query heads of a shard share its n key-value heads in order, heads / shards / n to each.
    """
    group = heads // kv_heads
    here = heads // shards
    owner = np.arange(heads).reshape(shards, here) // group
    if here % group == 0:
        return owner[:, ::group]
    if group % here == 0:
        return owner[:, :1]
    return owner
