"""Attention to pages by cuDNN: it gathers the pages of sequences, as many as the longest one has.

Source: NVIDIA cuDNN developer guide, "Scaled dot product attention".
"""

import functools

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError
from shardlib.nn.attention.backends import cudnn_obstacles
from shardlib.nn.attention.group_pages import GroupPages
from shardlib.nn.attention.mask import Mask
from shardlib.sharding.constrain import platform

_FEWEST_KEYS = 512
"""Keys that are gathered of each sequence at least; then twice, four times, ... as many."""


def check(query: jax.Array, pages: GroupPages, mask: Mask, *, is_plain: bool) -> None:
    """Raises `ModelError` unless cuDNN computes attention of rows [..., heads, head_dim] to pages;
    `is_plain` is as in `empty_pages`, for query heads that are cut as heads of keys."""
    head_dim = query.shape[-1]
    dims = head_dim, pages.value_dim(pages.num_heads(head_dim))
    obstacles = cudnn_obstacles(platform(), query.dtype, dims, mask.softcap, False, ())
    if not is_plain:
        obstacles.append(
            "scores have sinks or a bias, keys come from an encoder, or the rules cut heads of "
            "queries and of keys differently"
        )
    if obstacles:
        raise ModelError(
            f"attention to pages by cuDNN cannot run here: {'; '.join(obstacles)}.\n"
            "  Use attention='auto' or 'xla'."
        )


def attend_gathered(
    query: jax.Array,
    pages: GroupPages,
    layer: int | jax.Array,
    positions: jax.Array,
    tables: jax.Array,
    lanes: jax.Array,
    mask: Mask,
    *,
    window: jax.Array | int | None,
) -> jax.Array:
    """Returns attention [rows, heads, head_dim] of rows to their sequences.

    Args:
        query: [rows, heads, head_dim].
        pages: Of one group.
        layer: The layer.
        positions: [rows] int32.
        tables, lanes: As in `Rows`, of one group.
        mask: The scale of the scores.
        window: As in `attend_pages`.
    """
    slots, (_, heads, head_dim) = len(tables), query.shape
    kv_heads = pages.num_heads(head_dim)
    read = functools.partial(_attended, pages, layer, mask.factor(head_dim), window)
    # The heads that share the keys of a slot are its rows: all of them see the same keys.
    of_slots = query[:slots].reshape(slots, kv_heads, -1, head_dim).swapaxes(1, 2)
    at = jnp.broadcast_to(positions[:slots, None], of_slots.shape[:2])
    found = read(of_slots, at, tables)
    found = found.swapaxes(1, 2).reshape(slots, heads, head_dim)
    if not len(lanes):
        return found
    of_lanes = query[slots:].reshape(len(lanes), -1, heads, head_dim)
    of_lanes = read(of_lanes, positions[slots:].reshape(len(lanes), -1), lanes)
    return jnp.concatenate([found, of_lanes.reshape(-1, heads, head_dim)])


def _attended(
    pages: GroupPages,
    layer: int | jax.Array,
    scale: float,
    window: jax.Array | int | None,
    query: jax.Array,
    positions: jax.Array,
    tables: jax.Array,
) -> jax.Array:
    """Returns attention of queries [sequences, rows, heads, head_dim] at positions [sequences,
    rows] to the keys of each sequence."""
    kv_heads, last = pages.num_heads(query.shape[-1]), jnp.max(positions, axis=1)

    def of_first(num_pages: int) -> jax.Array:
        read = functools.partial(pages.read, layer, kv_heads=kv_heads, dtype=query.dtype)
        key, value = (jnp.moveaxis(x, 1, 2) for x in jax.vmap(read)(tables[:, :num_pages]))
        at = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
        # Another sequence may have left a NaN there.
        is_own = (at <= last[:, None])[..., None, None]
        key, value = (jnp.where(is_own, x, 0).astype(query.dtype) for x in (key, value))
        distance = positions[:, :, None] - at[:, None]
        is_seen = distance >= 0
        if window is not None:
            is_seen &= distance < window
        # A CPU computes the same in tests.
        how = "xla" if platform() == "cpu" else "cudnn"
        return jax.nn.dot_product_attention(
            query, key, value, mask=is_seen[:, None], scale=scale, implementation=how
        )

    counts, most = [], tables.shape[1]
    count = max(_FEWEST_KEYS // pages.page_size, 1)
    while count < most:
        counts.append(count)
        count *= 2
    needed = jnp.max(last) // pages.page_size + 1
    enough = jnp.sum(jnp.asarray(counts, jnp.int32) < needed, dtype=jnp.int32)
    branches = [functools.partial(of_first, count) for count in (*counts, most)]
    return jax.lax.switch(enough, branches)
