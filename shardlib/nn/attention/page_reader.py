"""Attention of single positions to the pages of one group.

Each row reads its keys in blocks of fixed size, one after the other, as many as its position needs,
and a block that it does not see leaves its sums as they are. Which rows read a block together is a
`Together`.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from shardlib.nn.attention.group_pages import GroupPages
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.page_kernel import VECTOR, PageSums, has_page_kernel, page_sums
from shardlib.nn.attention.paged import asked
from shardlib.sharding.constrain import active

Together = Literal["rows", "lanes", "all"]
"""The rows that read a block together: none, so that the result of a row has the same bits whatever
the other rows are; the rows of a lane; or all rows, as on GPUs and TPUs."""
_BLOCKS: dict[Together, tuple[int, int]] = {
    "rows": (128, 128),
    "lanes": (16, 64),
    "all": (512, 512),
}
"""Keys of a block, at least one page, of the row of a slot and the rows of a lane. They are equal
for rows that are read apart, whose bits would else depend on where they stand. A row of a slot
reads few keys beyond its position where its blocks are small."""
_SLOTS = 8
"""Rows of slots that `lanes` computes at once, each with keys of its own: cores share them."""
# Finite: of a row that has seen nothing, exp(start - start) is 1.
_START = -1e30


def attend_group(
    query: jax.Array,
    pages: GroupPages,
    layer: int | jax.Array,
    positions: jax.Array,
    tables: jax.Array,
    lanes: jax.Array,
    mask: Mask,
    *,
    window: jax.Array | int | None,
    sinks: jax.Array | None,
    reading: Together,
    firsts: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """Returns attention [rows, heads, value_dim] of rows to their sequences; see `attend_pages`.
    `firsts` [rows] are the first positions that rows see; None for 0."""
    (num_rows, heads, head_dim), dtype = query.shape, query.dtype
    kv_heads = pages.num_heads(head_dim)
    value_dim = pages.value_dim(kv_heads)
    group = heads // kv_heads
    query = mask.scaled(query.astype(jnp.float32), head_dim)
    query = query.reshape(num_rows, kv_heads, group, head_dim)
    if reading == "all":
        # Products of 16 bits; their sums are float32.
        query = query.astype(dtype)
    if bias is not None:
        bias = bias.astype(jnp.float32).reshape(kv_heads, group, -1)
    of_row, of_lane = (max(keys // pages.page_size, 1) for keys in _BLOCKS[reading])
    start = PageSums(
        jnp.full((kv_heads, group), _START),
        jnp.zeros((kv_heads, group)),
        jnp.zeros((kv_heads, group, value_dim)),
    )
    reader = _BlockReader(pages, of_row, kv_heads, layer, mask, window, reading, dtype, bias, start)
    slots = tables.shape[0]
    seen = _SeenPositions(firsts, positions)
    of_slots, of_lanes = (
        jax.tree.map(cut, seen) for cut in (lambda x: x[:slots], lambda x: x[slots:])
    )
    kernel = reader.by_kernel if reading == "lanes" and reader.fits_kernel() else None
    sums = (kernel or reader.of_slots)(query[:slots], of_slots, tables)
    if lanes.shape[0]:
        reader = reader._replace(pages_a_block=of_lane)
        of_lanes = (kernel or reader.of_lanes)(query[slots:], of_lanes, lanes)
        sums = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), sums, of_lanes)
    return _finished(sums, sinks).reshape(num_rows, heads, value_dim).astype(dtype)


class _SeenPositions(NamedTuple):
    """The positions that rows see, both included; `first` is None for 0."""

    first: jax.Array | None
    last: jax.Array


class _BlockReader(NamedTuple):
    """Keys and values of one layer, read in blocks."""

    pages: GroupPages
    pages_a_block: int
    kv_heads: int
    layer: int | jax.Array
    mask: Mask
    window: jax.Array | int | None
    reading: Together
    dtype: jax.typing.DTypeLike
    """The dtype in which keys and values are read."""
    bias: jax.Array | None
    """Added to scores by distance: [kv_heads, group, distances] float32."""
    start: PageSums
    """The sums of a row that has seen nothing."""

    @property
    def block(self) -> int:
        """Positions in a block."""
        return self.pages_a_block * self.pages.page_size

    def fits_kernel(self) -> bool:
        """Returns whether `page_sums` knows these pages and scores, on the one device there is."""
        scope = active()
        is_whole = scope is None or scope.mesh.size == 1
        dtypes = {pages.dtype for pages in (self.pages.key, self.pages.value) if pages is not None}
        is_known = self.pages.by_head and dtypes == {jnp.dtype(jnp.float32)}
        is_known = is_known and self.pages.value_dim(self.kv_heads) % VECTOR == 0
        is_plain = self.bias is None and self.mask.softcap is None
        is_asked = asked()[0] == "auto"
        return is_asked and is_whole and is_known and is_plain and has_page_kernel()

    def by_kernel(self, query: jax.Array, seen: _SeenPositions, tables: jax.Array) -> PageSums:
        """Returns the sums of rows with a table each, or of lanes."""
        pages, first = self.pages, self._first_position(seen)
        first = jnp.broadcast_to(jnp.asarray(first, jnp.int32), seen.last.shape)
        value = cast(jax.Array, pages.value)
        return page_sums(query, pages.key, value, self.layer, first, seen.last, tables)

    def of_slots(self, query: jax.Array, seen: _SeenPositions, tables: jax.Array) -> PageSums:
        """Returns the sums of rows with a table each."""
        over = query, seen, self._whole_blocks(tables)

        def of_row(row: tuple[jax.Array, _SeenPositions, jax.Array]) -> PageSums:
            query, seen, table = row

            def add(number: jax.Array, sums: PageSums) -> PageSums:
                read = self._read(table, number, seen.last)
                return self._added(sums, query, seen, number, *read)

            return jax.lax.fori_loop(self._first(seen), self._end(seen.last), add, self.start)

        if self.reading != "lanes":
            return _mapped(of_row, over, together=self.reading == "all")
        # Rows of about equal lengths, as all take as many blocks as the longest.
        order = jnp.argsort(seen.last)
        over = jax.tree.map(lambda x: x[order], over)
        sums = jax.lax.map(of_row, over, batch_size=_SLOTS)
        back = jnp.argsort(order)
        return jax.tree.map(lambda x: x[back], sums)

    def of_lanes(self, query: jax.Array, seen: _SeenPositions, tables: jax.Array) -> PageSums:
        """Returns the sums of lanes, whose rows read each block together."""
        lanes = tables.shape[0]
        width = query.shape[0] // lanes
        query, seen = jax.tree.map(lambda x: x.reshape(lanes, width, *x.shape[1:]), (query, seen))
        many = jax.tree.map(lambda x: jnp.broadcast_to(x, (width, *x.shape)), self.start)

        def of_lane(lane: tuple[jax.Array, _SeenPositions, jax.Array]) -> PageSums:
            query, seen, table = lane
            last = jnp.max(seen.last)

            def add(number: jax.Array, sums: PageSums) -> PageSums:
                key, value = self._read(table, number, last)

                def of_row(row: tuple[PageSums, jax.Array, _SeenPositions]) -> PageSums:
                    return self._added(*row, number, key, value)

                return _mapped(of_row, (sums, query, seen), together=self.reading != "rows")

            first, end = self._first(jax.tree.map(jnp.min, seen)), self._end(last)
            return jax.lax.fori_loop(first, end, add, many)

        over = query, seen, self._whole_blocks(tables)
        sums = _mapped(of_lane, over, together=self.reading == "all")
        return jax.tree.map(lambda x: x.reshape(lanes * width, *x.shape[2:]), sums)

    def _whole_blocks(self, tables: jax.Array) -> jax.Array:
        return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % self.pages_a_block)))

    def _first(self, seen: _SeenPositions) -> jax.Array | int:
        """Returns the first block that a row sees."""
        return self._first_position(seen) // self.block

    def _first_position(self, seen: _SeenPositions) -> jax.Array | int:
        first = 0 if seen.first is None else seen.first
        return first if self.window is None else jnp.maximum(seen.last - self.window + 1, first)

    def _end(self, position: jax.Array) -> jax.Array:
        return position // self.block + 1

    def _read(
        self, table: jax.Array, number: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of one block: [kv_heads, block, dims] each.

        Values beyond the position `last` are 0: their weights are 0, but another sequence may have
        left a NaN there.
        """
        pages = jax.lax.dynamic_slice_in_dim(table, number * self.pages_a_block, self.pages_a_block)
        key, value = self.pages.read(self.layer, pages, self.kv_heads, self.dtype)
        is_own = number * self.block + jnp.arange(self.block, dtype=jnp.int32) <= last
        return key, jnp.where(is_own[:, None], value, 0)

    def _added(
        self,
        sums: PageSums,
        query: jax.Array,
        seen: _SeenPositions,
        number: jax.Array,
        key: jax.Array,
        value: jax.Array,
    ) -> PageSums:
        """Returns the sums of a row with one more block."""
        wide = {"preferred_element_type": jnp.float32}
        scores = jnp.einsum("kgd,ksd->kgs", query, key.astype(query.dtype), **wide)
        scores = self.mask.capped(scores)
        at = number * self.block + jnp.arange(self.block, dtype=jnp.int32)
        if self.bias is not None:
            distances = jnp.clip(seen.last - at, 0, self.bias.shape[-1] - 1)
            scores = scores + self.bias[..., distances]
        is_seen = at <= seen.last
        if seen.first is not None:
            is_seen &= at >= seen.first
        if self.window is not None:
            is_seen &= at > seen.last - self.window
        scores = jnp.where(is_seen, scores, -jnp.inf)
        peak = jnp.maximum(sums.peak, jnp.max(scores, axis=-1))
        weights, kept = jnp.exp(scores - peak[..., None]), jnp.exp(sums.peak - peak)
        new = jnp.einsum("kgs,ksd->kgd", weights.astype(value.dtype), value, **wide)
        return PageSums(
            peak,
            sums.total * kept + jnp.sum(weights, axis=-1),
            sums.values * kept[..., None] + new,
        )


def _mapped(function: Callable[[Any], Any], over: Any, *, together: bool) -> Any:
    """Returns the results of a function for each row, or lane."""
    return jax.vmap(function)(over) if together else jax.lax.map(function, over)


def _finished(sums: PageSums, sinks: jax.Array | None) -> jax.Array:
    """Returns the weighted means [rows, kv_heads, group, value_dim]."""
    if sinks is None:
        return sums.values / sums.total[..., None]
    sinks = sinks.astype(jnp.float32).reshape(1, *sums.peak.shape[1:])
    peak = jnp.maximum(sums.peak, sinks)
    kept = jnp.exp(sums.peak - peak)
    return sums.values * kept[..., None] / (sums.total * kept + jnp.exp(sinks - peak))[..., None]
