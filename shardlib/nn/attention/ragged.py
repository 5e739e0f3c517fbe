"""Ragged paged attention: the JAX kernel for TPUs, which reads the pages of sequences in place.

Source: `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp

from shardlib.nn.attention.group_pages import GroupPages
from shardlib.nn.attention.mask import Mask

_LANES, _SUBLANES = 128, 8
"""A TPU's vector register holds 8 x 128 numbers of 32 bits. Source: the JAX documentation, "Writing
TPU kernels with Pallas"."""
_MOST_KEYS, _MOST_QUERIES = 512, 32
"""Keys that the kernel fetches at a time, and queries that it works on."""
_KEY_BYTES, _QUERY_BYTES = 2 << 20, 5 << 20
"""The most that they take of the 16 MiB of vector memory that a program gets: the kernel holds two
blocks of keys, and scores."""
_MOST_TABLE_BYTES = 960 << 10
"""The kernel keeps the tables of a step in scalar memory, which has 1 MiB."""


def can_hold(
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    page_size: int,
) -> bool:
    """Returns whether the kernel reads pages of a device, which has `heads` query heads and
    `kv_heads` heads of keys and values with `dims`."""
    dtype = jnp.dtype(dtype)
    if dims[0] != dims[1] or dtype not in (jnp.float32, jnp.bfloat16) or heads % kv_heads:
        return False
    # It takes heads with more lanes out of a block of keys only if there is one, in 16 bits.
    is_alone = kv_heads == 1 and dtype == jnp.bfloat16
    if dims[0] != _LANES and (dims[0] % _LANES or not is_alone):
        return False
    # The keys and values of all heads of a position fill whole tiles.
    both, packed = 2 * kv_heads, 4 // dtype.itemsize
    tile = _SUBLANES * packed
    if both % packed or (both // packed not in (1, 2, 4) and both % tile):
        return False
    of_queries, of_keys = _heads_of_block(heads, kv_heads, dtype)
    is_whole = of_queries == heads or of_queries % _SUBLANES == 0
    return is_whole and page_size * of_keys * dims[0] * dtype.itemsize <= _KEY_BYTES


def _heads_of_block(heads: int, kv_heads: int, dtype: jnp.dtype) -> tuple[int, int]:
    """Returns the query heads that the kernel works on at a time, and their keys and values: those
    of one tile, or all."""
    packed = 4 // dtype.itemsize
    tile = _SUBLANES * packed
    rest, of_tile = 2 * kv_heads % tile, tile // 2 * (heads // kv_heads)
    fills_tiles = of_tile // packed in (1, 2, 4) or of_tile % tile == 0
    return (heads, 2 * kv_heads) if rest or not fills_tiles else (of_tile, tile)


def can_read(num_slots: int, num_lanes: int, pages_a_row: int) -> bool:
    """Returns whether the tables of a step fit the scalar memory, which pads them to whole
    registers."""
    rows = -(-(num_slots + 2 * num_lanes) // _SUBLANES) * _SUBLANES
    return rows * -(-pages_a_row // _LANES) * _LANES * 4 <= _MOST_TABLE_BYTES


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
    # The kernel does not reach a last sequence that has no row.
    count = len(lengths) - (starts[-1:] == starts[-2:-1]).astype(jnp.int32)
    of_layer = of_sequences + layer * num_pages
    cache = pages.key.reshape(num_layers * num_pages, page_size, heads, dims)
    of_queries, of_keys = _heads_of_block(query.shape[1], heads // 2, query.dtype)
    width = query.dtype.itemsize
    keys = min(_MOST_KEYS, _KEY_BYTES // (of_keys * dims * width))
    # A query and its result twice, and in float32 the sum of values, of weights and the peak.
    query_bytes = of_queries * (4 * dims * width + 4 * (dims + 2 * _LANES))
    queries = min(_MOST_QUERIES, len(query), max(_QUERY_BYTES // query_bytes, 1))
    read = functools.partial(
        ragged_paged_attention,
        sm_scale=mask.factor(dims),
        soft_cap=mask.softcap,
        num_kv_pages_per_block=min(max(keys // page_size, 1), tables.shape[1]),
        num_queries_per_block=queries,
    )
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
