"""Dispatch with a fixed capacity: an expert takes up to a fixed number of tokens per row.

An expert has `capacity(length, ...)` places for the tokens of one row. First choices come before
second ones, and earlier tokens before later ones. A copy without a place is dropped and
adds nothing: the token stays on the residual stream. Places are counted within a row, so drops
depend on neither the mesh nor the batch size. All shapes are fixed: plain matmuls and
an all-to-all.

Under context parallelism places are still counted over the whole row. The buffers of each part of a
row are sized for the case that its own tokens take all the places.

Source: Lepikhin et al. 2020, "GShard", sec. 2.2; Fedus et al. 2021, "Switch Transformers", eq. 3.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shardlib.nn.moe.rows import collect, spread, weighted_sum
from shardlib.nn.moe.weights import ExpertWeights, Glu, mlp_of_slots


def capacity(length: int, k: int, num_experts: int, factor: float) -> int:
    """Returns the number of places of an expert for a row of `length` tokens, at least 1.

    A factor of 1 suffices exactly when all experts are chosen equally often.
    """
    return max(1, min(length, math.ceil(factor * k * length / num_experts)))


def with_capacity(
    tokens: Float[Array, "batch length embed"],
    experts: Int[Array, "batch length k"],
    weights: Float[Array, "batch length k"],
    counted: Bool[Array, "batch length"],
    mlp: ExpertWeights,
    glu: Glu,
    *,
    places: int,
    axes: tuple[str, ...] = (),
    length_axes: tuple[str, ...] = (),
) -> tuple[Float[Array, "batch length embed"], Bool[Array, "batch length k"]]:
    """Returns the weighted sums of the experts' outputs, and the copies that they took.

    Args:
        tokens: The tokens of this device.
        experts: int32, from 0 to E - 1; a copy for E takes no place.
        weights: float32.
        counted: Uncounted tokens take no place and give 0.
        mlp: The experts of this device: all of them, or its shard over `axes`.
        glu: The hidden units of an expert from its projections, as `gated(jax.nn.silu)`.
        places: `capacity` for the length of a whole row.
        axes: Mesh axes, manual here, that shard the experts; () for none.
        length_axes: Mesh axes, manual here, that shard the rows; () for none.
    """
    batch, length, embed = tokens.shape
    k = experts.shape[2]
    num_experts = mlp.gate.shape[0] * (jax.lax.axis_size(axes) if axes else 1)
    kept, slot = _slots(experts, counted, num_experts, places, length_axes)

    # Flat buffers [expert, batch, slot]: the slot of each copy, and the copy in each slot.
    slots = min(places, length)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    beyond = num_experts * batch * slots
    place = jnp.where(kept, (experts * batch + row) * slots + slot, beyond).reshape(-1, k)
    copies = jnp.arange(place.size, dtype=jnp.int32)
    source = jnp.full(beyond, place.size, jnp.int32).at[place.reshape(-1)].set(copies, mode="drop")

    rows = spread(tokens.reshape(-1, embed), source, place)
    rows = rows.reshape(num_experts, batch * slots, embed)
    if axes:
        rows = jax.lax.all_to_all(rows, axes, split_axis=0, concat_axis=1, tiled=True)
    rows = mlp_of_slots(rows, mlp, glu)
    if axes:
        rows = jax.lax.all_to_all(rows, axes, split_axis=1, concat_axis=0, tiled=True)
    taken = collect(rows.reshape(-1, embed), source, place)
    weights = jnp.where(kept, weights, 0.0).reshape(-1, k)
    return weighted_sum(taken, weights).reshape(tokens.shape), kept


def _slots(
    experts: jax.Array,
    counted: jax.Array,
    num_experts: int,
    places: int,
    length_axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """Returns the copies that get a place, and their slots on this device: [batch, length, k].

    The arguments are as in `with_capacity`.
    """
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32)
    chosen = jnp.where(counted[:, :, None, None], chosen, 0)
    totals = jnp.sum(chosen, axis=1, dtype=jnp.int32)  # [batch, k, expert]
    before = _earlier(totals, 1)
    slot = _earlier(chosen, 1) + before[:, None]
    position = slot
    if length_axes:
        parts = jax.lax.all_gather(totals, length_axes)  # [part, batch, k, expert]
        preceding = _earlier(parts, 0)[jax.lax.axis_index(length_axes)]
        choices = _earlier(jnp.sum(parts, axis=0, dtype=jnp.int32), 1)
        position = _earlier(chosen, 1) + (preceding + choices)[:, None]
    mine = chosen == 1
    kept = jnp.any(mine & (position < places), axis=-1)
    # A copy that precedes another in the row precedes it on this device too, so the copies kept
    # here take the first slots.
    return kept, jnp.sum(jnp.where(mine, slot, 0), axis=-1, dtype=jnp.int32)


def _earlier(counts: jax.Array, dim: int) -> jax.Array:
    """Returns the sums of the entries before each entry along a dim."""
    return jnp.cumsum(counts, axis=dim, dtype=jnp.int32) - counts
