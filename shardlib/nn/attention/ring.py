"""Ring attention: keys and values travel around a mesh axis while queries stay.

At every step a device folds the keys that it holds into a running softmax while they are already on
their way to the next device. In the backward pass keys and values travel again together with their
gradients. The weights are recomputed, so no quadratic array is kept. A device skips hidden work by
whole tiles (`Mask.tiles`), and no collective is inside a conditional.

Over C devices keys and values make C - 1 hops forward and C - 1 backward. Their float32 gradients
make C hops, the last of which takes them home. A window in contiguous order needs fewer hops.

Source: Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers for Near-Infinite
Context".
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from shardlib.nn.attention.blockwise import Queries, Running, fold, pull_back
from shardlib.nn.attention.order import AXIS
from shardlib.nn.attention.shard import Cargo, SequenceShard, attention_of_shards


def _apart(queries: Queries, cargo: Cargo) -> tuple[Queries, Cargo]:
    """Returns the arrays behind one optimization barrier.

    Segments are the same in every layer, so XLA would hoist their ring out of the loop over layers.
    On CPU it runs both rings at once, and mixes up their sends.
    """
    return jax.lax.optimization_barrier((queries, cargo))


def _send(shard: SequenceShard, x: PyTree, distance: int = 1) -> PyTree:
    """Sends a pytree to the device `distance` places further along the ring."""
    pairs = [(i, (i + distance) % shard.shards) for i in range(shard.shards)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, pairs), x)


def _source(shard: SequenceShard, step: int | jax.Array) -> jax.Array:
    """Returns the index of the device whose keys arrive after `step` hops."""
    return (jax.lax.axis_index(AXIS) - step) % shard.shards


def _forward(shard, queries, cargo, running):
    queries, cargo = _apart(queries, cargo)

    def meet(running: Running, cargo: Cargo, step: int | jax.Array) -> Running:
        return fold(running, queries, shard.keys(cargo, _source(shard, step)), shard.mask)

    def one_hop(carry: PyTree, step: jax.Array) -> tuple[Any, None]:
        running, cargo = carry
        ahead = _send(shard, cargo)
        return (meet(running, cargo, step), ahead), None

    steps = jnp.arange(shard.hops, dtype=jnp.int32)
    (running, cargo), _ = jax.lax.scan(one_hop, (running, cargo), steps)
    return meet(running, cargo, shard.hops)


def _backward(shard, queries, cargo, known):
    queries, cargo = _apart(queries, cargo)

    def meet(of_query: jax.Array, cargo: Cargo, step: int | jax.Array) -> PyTree:
        keys = shard.keys(cargo, _source(shard, step))
        return pull_back(of_query, queries, keys, known, shard.mask)

    def one_hop(carry: PyTree, step: jax.Array) -> tuple[Any, None]:
        # Neither transfer waits for the tiles of this step.
        of_query, of_keys, cargo, ahead = *carry, _send(shard, carry[-1])
        arrived = _send(shard, of_keys)
        of_query, share = meet(of_query, cargo, step)
        return (of_query, jax.tree.map(jnp.add, arrived, share), ahead), None

    ahead = _send(shard, cargo) if shard.hops else cargo
    of_query, of_keys = meet(jnp.zeros(queries.query.shape, jnp.float32), cargo, 0)
    if shard.hops:
        steps = jnp.arange(1, shard.hops, dtype=jnp.int32)
        carry, _ = jax.lax.scan(one_hop, (of_query, of_keys, ahead), steps)
        of_query, of_keys, cargo = carry
        arrived = _send(shard, of_keys)
        of_query, share = meet(of_query, cargo, shard.hops)
        of_keys = _send(shard, jax.tree.map(jnp.add, arrived, share), -shard.hops)
    return of_query, of_keys


ring_attention = attention_of_shards(_forward, _backward)
