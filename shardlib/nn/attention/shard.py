"""One device's shard of a row, cut into tiles: shared by ring attention and gathered attention."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from shardlib.nn.attention import order as orders
from shardlib.nn.attention.blockwise import (
    Cotangents,
    KeyGradients,
    Keys,
    Queries,
    Running,
    Segments,
    cut_keys,
    cut_queries,
    tiled_attention,
)
from shardlib.nn.attention.mask import Mask, Places
from shardlib.nn.attention.order import AXIS, Order
from shardlib.nn.attention.tiles import cut, needed_tile


class Cargo(NamedTuple):
    """The arrays that one device sends to others, in tiles."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None


@dataclasses.dataclass(frozen=True)
class SequenceShard:
    """The static description of a shard."""

    mask: Mask
    order: Order
    shards: int
    length: int
    """Positions of one shard."""

    @property
    def tile(self) -> int:
        return needed_tile(orders.ring_tile(self.order, self.length))

    @property
    def hops(self) -> int:
        """Returns the number of hops of the keys in a ring."""
        return orders.hops(self.order, self.mask, self.shards, self.length)

    def cut(
        self, query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments
    ) -> tuple[Queries, Cargo]:
        """Returns this device's queries and the cargo that it sends."""
        ids, kv_ids = jax.tree.map(lambda x: cut(x, self.tile), segments)
        at = Places(self.positions(jax.lax.axis_index(AXIS)), ids)
        queries = Queries(cut_queries(query, key.shape[2], self.tile), at)
        return queries, Cargo(cut_keys(key, self.tile), cut_keys(value, self.tile), kv_ids)

    def positions(self, shard: Any) -> Any:
        """Returns the positions of a shard in the row: [tiles, 1, tile] int32."""
        return cut(orders.row_positions(self.order, shard, self.shards, self.length), self.tile)

    def keys(self, cargo: Cargo, shard: Any) -> Keys:
        """Returns the keys that came from `shard`."""
        return Keys(cargo.key, cargo.value, Places(self.positions(shard), cargo.segments))


def attention_of_shards(
    forward: Callable[[SequenceShard, Queries, Cargo, Running], Running],
    backward: Callable[[SequenceShard, Queries, Cargo, Cotangents], tuple[jax.Array, KeyGradients]],
) -> Callable[..., jax.Array]:
    """Returns attention over a whole row, of which each device has a shard.

    `forward` and `backward` are as in `tiled_attention`; keys come as this device's cargo.
    """
    attend = tiled_attention(SequenceShard.cut, forward, backward)

    def attention(
        query: Float[Array, "batch length heads head_dim"],
        key: Float[Array, "batch length kv_heads head_dim"],
        value: Float[Array, "batch length kv_heads value_dim"],
        segments: Segments = (None, None),
        sinks: Float[Array, " heads"] | None = None,
        *,
        mask: Mask,
        order: Order,
    ) -> Float[Array, "batch length heads value_dim"]:
        """Returns attention over the whole row; call it in a region that is manual over `context`.

        Args:
            query: This device's shard of the row in `order`.
            key: The same shard.
            value: As `key`.
            segments: [batch, length] int32 of queries and of keys, or None.
            sinks: Scores of the sinks of this device's heads, or None.
            mask: The causal mask and the window.
            order: Order of the row over the axis.
        """
        shard = SequenceShard(mask, order, jax.lax.axis_size(AXIS), query.shape[1])
        return attend(shard, query, key, value, segments, sinks)

    return attention
