"""Attention to keys and values in pages, by what reads them best.

| reading | runs on              | reads                                                     |
|---------|----------------------|-----------------------------------------------------------|
| rows    | everything           | blocks, each row its own                                  |
| lanes   | everything, as a CPU | blocks, the rows of a lane together                       |
| all     | everything           | blocks, all rows together: the reference of the two below |
| ragged  | TPU                  | pages, by a kernel of JAX                                 |
| cudnn   | GPU, 16 bits         | pages that are gathered, by cuDNN                         |
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from shardlib.nn.attention import page_cudnn, ragged
from shardlib.nn.attention.group_pages import GroupPages
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.page_cudnn import attend_gathered
from shardlib.nn.attention.page_reader import Together, attend_group
from shardlib.nn.attention.paged import Pages, Rows, asked, group_axes
from shardlib.nn.attention.ragged import attend_ragged
from shardlib.nn.attention.region import cut_by_rules
from shardlib.sharding.constrain import Scope, active, constrain, platform
from shardlib.sharding.manual import manual

Reading = Together | Literal["ragged", "cudnn"]
"""How keys are read; see the table of this module."""


def attend_pages(
    query: Float[Array, "groups rows heads head_dim"],
    key: Float[Array, "groups rows kv_heads head_dim"] | None,
    value: Float[Array, "groups rows kv_heads value_dim"] | None,
    pages: Pages,
    layer: int | Int[Array, ""],
    rows: Rows,
    mask: Mask,
    *,
    window: int | None = None,
    is_local: Bool[Array, ""] | None = None,
    sinks: Float[Array, " heads"] | None = None,
    bias: Float[Array, "heads distances"] | None = None,
    reading: Reading | None = None,
) -> tuple[Float[Array, "groups rows heads value_dim"], Pages]:
    """Writes a key and a value of each row, and returns attention of each row to the positions of
    its sequence up to its own, after the text of an encoder, and the pages.

    Args:
        query: A query for each row.
        key: A key for each row; None for attention to the text of the encoder alone.
        value: A value for each row, or None with `key`.
        pages: The cache. There are as many groups as parts into which the active rules cut `batch`.
        layer: The layer, an int32 scalar.
        rows: Where the rows belong.
        mask: Scale and bound of the scores. Its window is not read.
        window: Number of positions that a row sees, including its own; None for all.
        is_local: Whether the window counts in this layer; None for yes.
        sinks: As in `attend`.
        bias: Added to the scores of keys by their distance from the row; the last one counts for
            all longer distances.
        reading: How rows read keys; None for what `pages_read` says: `lanes` or `rows` on a CPU, on
            other platforms a kernel or `all`.
    """
    if reading is None:
        is_plain = key is not None and rows.num_encoded is None and sinks is None and bias is None
        reading = _reading(query, pages, rows, mask, is_plain)

    def of_one(pages: Pages, own: Any, shared: Any) -> tuple[jax.Array, Pages]:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), own)
        y, cache = _of_group(GroupPages(*pages), own, shared, mask, window, reading)
        return y[None], Pages(*cache)

    if key is not None and value is not None:
        count = GroupPages(*pages).num_heads(query.shape[-1])
        key, value = (_repeated(x, count) for x in (key, value))
    shared = layer, is_local, sinks, bias
    return _in_groups(of_one, pages, (query, key, value, rows), shared, reading)


def _in_groups(
    of_one: Callable[..., tuple[jax.Array, Pages]],
    pages: Pages,
    own: tuple[jax.Array, jax.Array | None, jax.Array | None, Rows],
    shared: Any,
    reading: Reading,
) -> tuple[jax.Array, Pages]:
    """Returns `of_one(pages, own, shared)` of each group on its devices, and for a kernel of the
    heads of each device: the compiler cannot partition it."""
    query, scope = own[0], active()
    axes, heads = group_axes(query.shape[0]), None
    batch = axes
    if scope is not None and reading in ("ragged", "cudnn"):
        axes = tuple(scope.sizes)
        batch, heads, _ = _cuts(scope, query, pages)
    if not axes:
        return of_one(pages, own, shared)
    # Devices of a group read as many blocks as its own rows need.
    shared = jax.tree.map(jnp.asarray, shared)
    of_heads = P(batch, None, heads)
    # The scales of a page have one dim.
    of_pages = jax.tree.map(lambda x: P(None, batch, None, *[None] * (x.ndim > 4), heads), pages)
    of_own = (of_heads, of_heads, of_heads, P(batch))
    region = manual(of_one, axes, (of_pages, of_own, P()), (of_heads, of_pages))
    return region(pages, own, shared)


def _repeated(x: jax.Array, heads: int) -> jax.Array:
    """Returns keys or values [groups, rows, kv_heads, dims] with as many heads as pages have."""
    if x.shape[2] == heads:
        return x
    return constrain(jnp.repeat(x, heads // x.shape[2], axis=2), "batch", None, "heads", None)


def _cuts(scope: Scope, query: jax.Array, pages: Pages) -> tuple[Any, Any, Any]:
    """Returns the entries by which the rules cut groups, heads of queries and heads of keys."""
    kv_heads = GroupPages(*pages).num_heads(query.shape[-1])
    return cut_by_rules(scope, query.shape, (*query.shape[:2], kv_heads, query.shape[-1]))


def _reading(query: jax.Array, pages: Pages, rows: Rows, mask: Mask, is_plain: bool) -> Reading:
    """Returns how rows read keys; `is_plain` is for rows that see all positions before their own,
    with no score but that of their product."""
    (backend, apart), scope, cache = asked(), active(), GroupPages(*pages)
    if platform() == "cpu":
        return "rows" if apart else "lanes"
    if scope is not None:
        _, heads, kv_heads = _cuts(scope, query, pages)
        is_plain &= heads == kv_heads
    if backend == "cudnn":
        page_cudnn.check(query, cache, mask, is_plain=is_plain)
        return "cudnn"
    (_, slots, pages_a_row), lanes = rows.tables.shape, rows.lanes.shape[1]
    fits = cache.in_turn and is_plain and ragged.can_read(slots, lanes, pages_a_row)
    is_ragged = fits and backend == "auto" and query.dtype == pages.key.dtype
    return "ragged" if is_ragged else "all"


def _of_group(
    cache: GroupPages, own: Any, shared: Any, mask: Mask, window: int | None, reading: Reading
) -> tuple[jax.Array, GroupPages]:
    """Returns the attention of the rows of one group, and its pages; see `attend_pages`."""
    query, key, value, rows = own
    layer, is_local, sinks, bias = shared
    last, firsts = rows.positions, rows.num_encoded
    if key is None:
        # Rows without a text see a position that nobody reads.
        last, firsts = jnp.maximum(rows.num_encoded - 1, 0), None
    else:
        cache = cache.written(layer, rows.positions, rows.pages, key, value)
    where = query, cache, layer, last
    tables = rows.tables, rows.lanes
    if reading == "ragged":
        return attend_ragged(
            *where, rows.pages > 0, *tables, mask, window=window, is_local=is_local
        ), cache
    seen = window
    if window is not None and is_local is not None:
        seen = jnp.where(is_local, window, jnp.iinfo(jnp.int32).max)
    if reading == "cudnn":
        return attend_gathered(*where, *tables, mask, window=seen), cache
    y = attend_group(
        *where,
        *tables,
        mask,
        window=seen,
        sinks=sinks,
        reading=reading,
        firsts=firsts,
        bias=bias,
    )
    return y, cache
