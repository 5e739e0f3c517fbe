"""Ragged paged attention: the JAX kernel for TPUs, which reads the pages of sequences in place.

Source: `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp

from shardlib.nn.attention.group_pages import GroupPages
from shardlib.nn.attention.mask import Mask

# Lanes of a TPU's vector registers: the kernel reads heads of so many dims, or a multiple.
# Source: the JAX documentation, "Writing TPU kernels with Pallas".
_HEAD_DIM_MULTIPLE = 128
_BITS_OF_SUBLANE = 32
_BLOCK_KEYS, _BLOCK_BYTES = 512, 2 << 20
"""Keys that the kernel fetches at a time, and the most that they take; it holds two such blocks in
the 16 MiB of vector memory that a program gets."""
_BLOCK_QUERIES = 32
_MOST_TABLE_BYTES = 960 << 10
"""Of the tables of a step, of 1 MiB of scalar memory, in which the kernel keeps them."""


def can_hold(kv_heads: int, dims: tuple[int, int], dtype: jax.typing.DTypeLike) -> bool:
    """Returns whether the kernel reads pages of `kv_heads` heads on a device, whose keys and values
    have `dims`."""
    if dims[0] != dims[1] or dims[0] % _HEAD_DIM_MULTIPLE:
        return False
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return False
    # Keys and values of all heads of a position fill whole tiles.
    sublanes, rest = divmod(2 * kv_heads * 8 * jnp.dtype(dtype).itemsize, _BITS_OF_SUBLANE)
    return not rest and (sublanes in (1, 2, 4) or sublanes % 8 == 0)


def can_read(num_slots: int, num_lanes: int, pages_a_row: int) -> bool:
    """Returns whether the tables of a step fit the scalar memory."""
    # Rows of tables are padded to whole registers.
    padded = -(-pages_a_row // _HEAD_DIM_MULTIPLE) * _HEAD_DIM_MULTIPLE
    return (num_slots + 2 * num_lanes) * padded * 4 <= _MOST_TABLE_BYTES


def attend_ragged(
    query: jax.Array,
    pages: GroupPages,
    layer: int | jax.Array,
    positions: jax.Array,
    is_used: jax.Array,
    tables: jax.Array,
    lanes: jax.Array,
    mask: Mask,
    *,
    window: int | None,
    is_local: jax.Array | None,
) -> jax.Array:
    """Returns attention [rows, heads, head_dim] of rows to their sequences, on a TPU.

    Args:
        query: [rows, heads, head_dim].
        pages: Keys and values in turn; see `GroupPages`.
        layer: The layer.
        positions: [rows] int32.
        is_used: [rows] bool, whether a row has a sequence. In each lane, rows that have one come
            first.
        tables, lanes: As in `Rows`, of one group.
        mask: Scale and bound of the scores.
        window, is_local: As in `attend_pages`.
    """
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    num_layers, _, num_pages, page_size, heads, dims = pages.key.shape
    sequences = _sequences(positions, is_used, tables, lanes)
    lengths, starts, of_sequences = sequences
    of_layer = of_sequences + layer * num_pages
    cache = pages.key.reshape(num_layers * num_pages, page_size, heads, dims)
    bytes_per_key = min(heads, 16) * dims * pages.key.dtype.itemsize
    keys = min(_BLOCK_KEYS, _BLOCK_BYTES // bytes_per_key)
    read = functools.partial(
        ragged_paged_attention,
        sm_scale=mask.factor(dims),
        soft_cap=mask.softcap,
        num_kv_pages_per_block=min(max(keys // page_size, 1), tables.shape[1]),
        num_queries_per_block=min(_BLOCK_QUERIES, len(query)),
    )
    count = jnp.full(1, len(lengths), jnp.int32)
    arrays = query, cache, lengths, of_layer, starts, count
    local = functools.partial(read, sliding_window=window)
    # A product of 16 bits is exact in float32, and the compiler refuses to be told so.
    is_exact = pages.key.dtype != jnp.float32
    precision = jax.default_matmul_precision("default") if is_exact else contextlib.nullcontext()
    with precision, jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        if window is None or is_local is None:
            return local(*arrays)
        # A branch each: the kernel knows its window.
        return jax.lax.cond(is_local, local, read, *arrays)


def _sequences(
    positions: jax.Array, is_used: jax.Array, tables: jax.Array, lanes: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rows as the sequences of the kernel: how many keys the last row of each sees, where
    its rows start (and where the last one ends), and its pages.

    A slot is a sequence of one row. A lane is two: its rows that have a sequence, and the rest,
    which read page 0.
    """
    slots, num_lanes = len(tables), len(lanes)
    lengths, counts = positions[:slots] + 1, jnp.ones(slots, jnp.int32)
    if num_lanes:
        of_lanes = positions[slots:].reshape(num_lanes, -1)
        width = of_lanes.shape[1]
        used = jnp.sum(is_used[slots:].reshape(num_lanes, -1), axis=1, dtype=jnp.int32)
        # A sequence that has no row has a key: the kernel fetches one block of each.
        both = jnp.stack([jnp.max(of_lanes, axis=1) + 1, jnp.maximum(width - used, 1)], axis=1)
        lengths = jnp.concatenate([lengths, both.reshape(-1)])
        rows = jnp.stack([used, width - used], axis=1)
        counts = jnp.concatenate([counts, rows.reshape(-1)])
        with_rest = jnp.stack([lanes, jnp.zeros_like(lanes)], axis=1)
        tables = jnp.concatenate([tables, with_rest.reshape(2 * num_lanes, -1)])
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    return lengths, starts, tables
