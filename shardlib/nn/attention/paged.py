"""Keys and values in pages, and attention to them.

A sequence owns pages anywhere in the cache, named in order by its table. Sequences belong to
groups, which have pages of their own: a group for each part into which devices cut the batch.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
PagedAttention", section 4.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Num

from shardlib.mesh import entry_axes
from shardlib.nn.attention import page_cudnn, ragged
from shardlib.nn.attention.backends import Backend
from shardlib.nn.attention.group_pages import GroupPages
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.page_cudnn import attend_gathered
from shardlib.nn.attention.page_reader import Together, attend_group
from shardlib.nn.attention.ragged import attend_ragged
from shardlib.nn.attention.region import cut_by_rules
from shardlib.sharding.constrain import Scope, active, constrain, platform
from shardlib.sharding.manual import manual


class Pages(NamedTuple):
    """Keys and values of a stack of layers: all heads of a position together, or on a CPU all
    positions of a head. Rows without a sequence write into page 0 of their group, which no sequence
    owns."""

    key: Num[Array, "layers groups pages *page"]
    """Each page is [page_size, kv_heads * key_dim], or on a CPU [kv_heads, page_size, key_dim], or
    [page_size, 2 * kv_heads, key_dim] on a TPU whose kernel reads it."""
    value: Num[Array, "layers groups pages *value_page"] | None
    """None if `key` has the keys and the values of each head in turn."""
    key_scale: Float[Array, "layers groups pages kv_heads*page_size"] | None = None
    """The scale of each head of each position, if pages are int8; heads first."""
    value_scale: Float[Array, "layers groups pages kv_heads*page_size"] | None = None


class Rows(NamedTuple):
    """Where the rows of a step belong: first a row for each slot, then `width` for each lane."""

    positions: Int[Array | np.ndarray, "groups rows"]
    """The position of each row in its sequence; 0 for a row without one."""
    pages: Int[Array | np.ndarray, "groups rows"]
    """The page that each row writes to; 0 for a row without a sequence."""
    tables: Int[Array | np.ndarray, "groups slots pages_a_row"]
    """The pages of the sequence of each slot, in order; 0 beyond its end."""
    lanes: Int[Array | np.ndarray, "groups lanes pages_a_row"]
    """The pages of the sequence of each lane, whose rows are consecutive positions."""
    num_encoded: Int[Array | np.ndarray, "groups rows"] | None = None
    """Of a decoder with an encoder: the first positions of the sequence of each row, which hold the
    keys and values of its text; 0 for a row without one."""


def empty_pages(
    num_layers: int,
    num_groups: int,
    num_pages: int,
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: jax.typing.DTypeLike,
) -> Pages:
    """Returns zero pages of a stack of layers, whose groups and heads the active rules cut as
    `batch` and `kv_heads`. If more devices share the query heads than there are key-value heads,
    each device holds the one that its query heads need: pages have a copy of it for each.

    Args:
        num_layers, num_groups, num_pages, page_size: Sizes.
        heads: Query heads, and heads of keys and values.
        dims: Dims of a head of keys and of values.
        dtype: Of both; int8 for keys and values in 8 bits, with a scale for each.
    """

    scope, kv_heads = active(), heads[1]
    batch, cut = None, None
    if scope is not None:
        # Cut between heads, or not at all.
        (batch, of_queries), (_, cut) = (
            scope.sharding(("batch", name), (num_groups, count), "activations").spec
            for name, count in zip(("heads", "kv_heads"), heads, strict=True)
        )
        kv_heads = heads_of_pages(kv_heads, _parts(of_queries))
        if kv_heads != heads[1]:
            cut = of_queries

    def zeros(dtype: jax.typing.DTypeLike, *page: int, heads_at: int = -1) -> jax.Array:
        pages = jnp.zeros((num_layers, num_groups, num_pages, *page), dtype)
        if scope is None:
            return pages
        of_page: list[Any] = [None] * len(page)
        of_page[heads_at] = cut
        spec = P(None, batch, None, *of_page)
        return jax.lax.with_sharding_constraint(pages, NamedSharding(scope.mesh, spec))

    if platform() == "cpu":
        pages = [zeros(dtype, kv_heads, page_size, size, heads_at=0) for size in dims]
    elif platform() == "tpu" and ragged.can_hold(kv_heads // _parts(cut), dims, dtype):
        return Pages(zeros(dtype, page_size, 2 * kv_heads, dims[0], heads_at=1), None)
    else:
        pages = [zeros(dtype, page_size, kv_heads * size) for size in dims]
    if dtype != jnp.int8:
        return Pages(*pages)
    # Heads and positions share a dim: TPUs lay out the last one in tiles of 128.
    return Pages(*pages, *[zeros(jnp.float32, kv_heads * page_size) for _ in dims])


def heads_of_pages(kv_heads: int, parts: int) -> int:
    """Returns the heads of keys and values in pages, if query heads are cut into `parts`."""
    return max(kv_heads, parts) if parts % kv_heads == 0 else kv_heads


def _repeated(x: jax.Array, heads: int) -> jax.Array:
    """Returns keys or values [groups, rows, kv_heads, dims] with as many heads as pages have."""
    if x.shape[2] == heads:
        return x
    return constrain(jnp.repeat(x, heads // x.shape[2], axis=2), "batch", None, "heads", None)


def _parts(entry: Any) -> int:
    """Returns the number of devices over which an entry of a spec cuts a dim."""
    scope = active()
    return 1 if scope is None else math.prod(scope.sizes[name] for name in entry_axes(entry))


Reading = Together | Literal["ragged", "cudnn"]
"""What reads the keys: rows, some of them together, by XLA or on a CPU a kernel of ours; the kernel
of TPUs; or cuDNN."""
_reading: contextvars.ContextVar[Together] = contextvars.ContextVar("reading", default="lanes")


@contextlib.contextmanager
def rows_apart(apart: bool = True) -> Iterator[None]:
    """Makes the bits of each row in the calls of `attend_pages` inside depend on its sequence
    alone, on a CPU: no row reads keys together with others. It takes longer."""
    token = _reading.set("rows" if apart else "lanes")
    try:
        yield
    finally:
        _reading.reset(token)


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
    backend: Backend = "auto",
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
        backend: As in `attend`: `auto` takes the kernel of TPUs where it can read these pages, and
            `cudnn` takes cuDNN on GPUs where it can; both are left out by `xla` and `blockwise`.
        reading: How rows read keys; None for `lanes` on a CPU, or `rows` within `rows_apart`, and
            on other platforms for what `backend` says, else `all`.
    """
    if reading is None:
        is_plain = key is not None and rows.num_encoded is None and sinks is None and bias is None
        kernel = _kernel(query, pages, rows, mask, backend) if is_plain else None
        reading = _reading.get() if platform() == "cpu" else kernel or "all"

    def of_one(pages: Pages, own: Any, shared: Any) -> tuple[jax.Array, Pages]:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), own)
        y, cache = _of_group(GroupPages(*pages), own, shared, mask, window, reading)
        return y[None], Pages(*cache)

    if key is not None and value is not None:
        count = GroupPages(*pages).num_heads(query.shape[-1])
        key, value = (_repeated(x, count) for x in (key, value))
    own, shared = (query, key, value, rows), (layer, is_local, sinks, bias)
    scope, axes, heads = active(), group_axes(query.shape[0]), None
    batch = axes
    if scope is not None and reading in ("ragged", "cudnn"):
        # The compiler cannot partition a kernel.
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


def _cuts(scope: Scope, query: jax.Array, pages: Pages) -> tuple[Any, Any, Any]:
    """Returns the entries by which the rules cut groups, heads of queries and heads of keys."""
    kv_heads = GroupPages(*pages).num_heads(query.shape[-1])
    return cut_by_rules(scope, query.shape, (*query.shape[:2], kv_heads, query.shape[-1]))


def _kernel(
    query: jax.Array, pages: Pages, rows: Rows, mask: Mask, backend: Backend
) -> Reading | None:
    """Returns the kernel that reads the pages, if one can."""
    scope, cache = active(), GroupPages(*pages)
    if scope is not None:
        _, heads, kv_heads = _cuts(scope, query, pages)
        if heads != kv_heads:
            return None
    if backend == "cudnn":
        return "cudnn" if page_cudnn.can_read(query, cache, mask) else None
    if not cache.in_turn or backend not in ("auto", "splash") or platform() != "tpu":
        return None
    (_, slots, pages_a_row), lanes = rows.tables.shape, rows.lanes.shape[1]
    fits = ragged.can_read(slots, lanes, pages_a_row) and query.dtype == pages.key.dtype
    return "ragged" if fits else None


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


def write_texts(
    pages: Pages,
    key: Float[Array, "layers groups texts length kv_heads head_dim"],
    value: Float[Array, "layers groups texts length kv_heads value_dim"],
    tables: Int[Array, "groups texts pages_a_row"],
    lengths: Int[Array, "groups texts"],
) -> Pages:
    """Returns pages with the keys and values of texts at the first positions of their sequences.

    Args:
        pages: The cache.
        key, value: Of all layers and positions.
        tables: The pages of the sequence of each text.
        lengths: The tokens of each text; positions after them are not kept.
    """

    def of_one(pages: Pages, own: Any) -> Pages:
        key, value = (jnp.squeeze(x, 1) for x in own[0])
        tables, lengths = (jnp.squeeze(x, 0) for x in own[1])
        cache = GroupPages(*pages)
        at = jnp.broadcast_to(jnp.arange(key.shape[2], dtype=jnp.int32), key.shape[1:3])
        own_pages = jnp.take_along_axis(tables, at // cache.page_size, axis=1)
        own_pages = jnp.where(at < lengths[:, None], own_pages, 0)

        def write(layer: jax.Array, cache: GroupPages) -> GroupPages:
            rows = (x[layer].reshape(-1, *x.shape[3:]) for x in (key, value))
            return cache.written(layer, at.reshape(-1), own_pages.reshape(-1), *rows)

        cache = jax.lax.fori_loop(0, key.shape[0], write, cache)
        return Pages(*cache)

    own = (key, value), (tables, lengths)
    axes = group_axes(tables.shape[0])
    if not axes:
        return of_one(pages, own)
    region = manual(of_one, axes, (P(None, axes), (P(None, axes), P(axes))), P(None, axes))
    return region(pages, own)


def group_axes(groups: int) -> tuple[str, ...]:
    """Returns the mesh axes over which groups are cut."""
    scope = active()
    if scope is None or groups == 1:
        return ()
    return entry_axes(scope.sharding(("batch",), (groups,), "activations").spec[0])
