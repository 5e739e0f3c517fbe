"""Attention with gathered keys: every device gets all keys and values, and keeps its own queries.

The forward pass runs one all-gather. The backward pass gathers again instead of keeping the result,
and reduce-scatters the gradients in float32. Memory for keys and values grows with the whole row,
which grouped heads make cheap.

Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from shardlib.nn.attention.blockwise import (
    Keys,
    Segments,
    cotangents,
    fold,
    gradients,
    of_sinks,
    outputs,
    pull_back,
    start,
)
from shardlib.nn.attention.mask import Mask, Places
from shardlib.nn.attention.order import AXIS, Order
from shardlib.nn.attention.shard import Cargo, SequenceShard


def gathered_attention(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch length kv_heads head_dim"],
    value: Float[Array, "batch length kv_heads value_dim"],
    segments: Segments = (None, None),
    sinks: Float[Array, " heads"] | None = None,
    *,
    mask: Mask,
    order: Order,
) -> Float[Array, "batch length heads value_dim"]:
    """Returns attention over the whole row; the arguments are as in `ring_attention`."""
    shard = SequenceShard(mask, order, jax.lax.axis_size(AXIS), query.shape[1])
    return _attend(shard, query, key, value, segments, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(shard, query, key, value, segments, sinks):
    return _forward(shard, query, key, value, segments, sinks)[0]


def _all_keys(shard: SequenceShard, cargo: Cargo) -> Keys:
    cargo = jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=0, tiled=True), cargo)
    row: Any = np.concatenate([shard.positions(i) for i in range(shard.shards)])
    return Keys(cargo.key, cargo.value, Places(row, cargo.segments))


def _forward(shard, query, key, value, segments, sinks):
    queries, cargo = shard.cut(query, key, value, segments)
    running = fold(
        start(queries, value.shape[-1], sinks), queries, _all_keys(shard, cargo), shard.mask
    )
    output, log_mass = outputs(running, value.dtype)
    return output, (query, key, value, segments, sinks, output, log_mass)


def _backward(shard, saved, grad):
    query, key, value, segments, sinks, output, log_mass = saved
    queries, cargo = shard.cut(query, key, value, segments)
    known = cotangents(grad, output, log_mass, key.shape[2], shard.tile)
    zeros = jnp.zeros(queries.query.shape, jnp.float32)
    of_query, of_keys = pull_back(zeros, queries, _all_keys(shard, cargo), known, shard.mask)
    of_keys = tuple(jax.lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True) for x in of_keys)
    of_arrays = gradients(of_query, of_keys, (query, key, value))
    return *of_arrays, (None, None), of_sinks(known, sinks)


_attend.defvjp(_forward, _backward)
