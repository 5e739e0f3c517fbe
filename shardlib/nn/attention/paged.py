"""Keys and values in pages.

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
from jaxtyping import Array, Float, Int, Num

from shardlib.mesh import entry_axes
from shardlib.nn.attention import ragged
from shardlib.nn.attention.group_pages import GroupPages
from shardlib.sharding.constrain import active, platform
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


PageBackend = Literal["auto", "xla", "cudnn"]
_asked: contextvars.ContextVar[tuple[PageBackend, bool]] = contextvars.ContextVar(
    "asked", default=("auto", False)
)


@contextlib.contextmanager
def pages_read(
    backend: PageBackend = "auto",
    *,
    apart: bool = False,
    tables: tuple[int, int, int] | None = None,
) -> Iterator[None]:
    """Says how `attend_pages` inside reads keys, and how `empty_pages` lays them out.

    Args:
        backend: `auto` takes JAX's ragged paged attention on TPUs and a kernel of shardlib on one
            CPU, where they can read the pages, and else XLA; `xla` takes XLA; `cudnn` takes cuDNN
            on GPUs.
        apart: Whether on a CPU no row reads keys together with others, so that its bits depend on
            its sequence alone. It takes longer.
        tables: Slots, lanes and pages of a row of the largest step; None if that is unknown.
    """
    if backend == "auto" and tables is not None and not ragged.can_read(*tables):
        backend = "xla"
    token = _asked.set((backend, apart))
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> tuple[PageBackend, bool]:
    """Returns the arguments of the innermost `pages_read`."""
    return _asked.get()


def empty_pages(
    num_layers: int,
    num_groups: int,
    num_pages: int,
    page_size: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    *,
    is_plain: bool = True,
) -> Pages:
    """Returns zero pages of a stack of layers, whose groups and heads the active rules cut as
    `batch` and `kv_heads`. If more devices share the query heads than there are key-value heads,
    each device holds the one that its query heads need: pages have a copy of it for each.

    Args:
        num_layers, num_groups, num_pages, page_size: Sizes.
        heads: Query heads, and heads of keys and values.
        dims: Dims of a head of keys and of values.
        dtype: Of both; int8 for keys and values in 8 bits, with a scale for each.
        is_plain: Whether attention to them has neither sinks nor a bias, with which the kernel of
            TPUs does not read them.
    """
    scope, kv_heads = active(), heads[1]
    batch, of_queries, cut = None, None, None
    if scope is not None:
        # Cut between heads, or not at all.
        (batch, of_queries), (_, cut) = (
            scope.sharding(("batch", name), (num_groups, count), "activations").spec
            for name, count in zip(("heads", "kv_heads"), heads, strict=True)
        )
        parts = _parts(of_queries)
        if parts > kv_heads and parts % kv_heads == 0:
            kv_heads, cut = parts, of_queries

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
    elif (
        is_plain
        and cut == of_queries
        and _has_kernel(heads[0], kv_heads, cut, dims, dtype, page_size)
    ):
        return Pages(zeros(dtype, page_size, 2 * kv_heads, dims[0], heads_at=1), None)
    else:
        pages = [zeros(dtype, page_size, kv_heads * size) for size in dims]
    if dtype != jnp.int8:
        return Pages(*pages)
    # Heads and positions share a dim: TPUs lay out the last one in tiles of 128.
    return Pages(*pages, *[zeros(jnp.float32, kv_heads * page_size) for _ in dims])


def _has_kernel(
    heads: int,
    kv_heads: int,
    cut: Any,
    dims: tuple[int, int],
    dtype: jax.typing.DTypeLike,
    page_size: int,
) -> bool:
    """Returns whether the kernel of TPUs is to read pages whose heads are all cut alike."""
    parts, (backend, _) = _parts(cut), asked()
    of_device = heads // parts, kv_heads // parts
    is_asked = platform() == "tpu" and backend == "auto"
    return is_asked and ragged.can_hold(*of_device, dims, dtype, page_size)


def _parts(entry: Any) -> int:
    """Returns the number of devices over which an entry of a spec cuts a dim."""
    scope = active()
    return 1 if scope is None else math.prod(scope.sizes[name] for name in entry_axes(entry))


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
