"""Attention with gathered keys: every device gets all keys and values, and keeps its own queries.

The forward pass runs one all-gather. The backward pass gathers again instead of keeping the result,
and reduce-scatters the gradients in float32. Memory for keys and values grows with the whole row,
which grouped heads make cheap.

Source: Grattafiori et al. 2024, "The Llama 3 Herd of Models", section 3.3.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.nn.attention.blockwise import Keys, fold, pull_back
from shardlib.nn.attention.mask import Places
from shardlib.nn.attention.order import AXIS
from shardlib.nn.attention.shard import Cargo, SequenceShard, attention_of_shards


def _all_keys(shard: SequenceShard, cargo: Cargo) -> Keys:
    cargo = jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=0, tiled=True), cargo)
    row: Any = np.concatenate([shard.positions(i) for i in range(shard.shards)])
    return Keys(cargo.key, cargo.value, Places(row, cargo.segments))


def _forward(shard, queries, cargo, running):
    return fold(running, queries, _all_keys(shard, cargo), shard.mask)


def _backward(shard, queries, cargo, known):
    zeros = jnp.zeros(queries.query.shape, jnp.float32)
    of_query, of_keys = pull_back(zeros, queries, _all_keys(shard, cargo), known, shard.mask)
    of_keys = (jax.lax.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True) for x in of_keys)
    return of_query, tuple(of_keys)


gathered_attention = attention_of_shards(_forward, _backward)
