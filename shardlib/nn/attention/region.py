"""The manual region of attention: batch and heads are independent across devices."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from shardlib.mesh import entry_axes, mesh_sizes
from shardlib.nn.attention.blockwise import Segments
from shardlib.nn.attention.order import AXIS
from shardlib.nn.attention.ulysses import kv_heads_of
from shardlib.sharding.constrain import Scope, active, manual_axes
from shardlib.sharding.manual import manual
from shardlib.sharding.shared_rows import row_parts

Local = Callable[[jax.Array, jax.Array, jax.Array, Segments, jax.Array | None], jax.Array]


def in_region(
    local: Local,
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    segments: Segments,
    sinks: Float[Array, " heads"] | None = None,
    *,
    over_context: bool,
    whole_mesh: bool = False,
) -> jax.Array:
    """Returns `local(query, key, value, segments, sinks)` of each device's own rows and heads,
    split as the active rules say. If there are fewer key-value heads than devices that share the
    query heads, each device takes the key-value heads that its query heads need.

    Args:
        local: Attention of arrays on one device.
        query: [batch, length, heads, head_dim]; global, like the other arrays.
        key: [batch, kv_length, kv_heads, head_dim].
        value: As `key`.
        segments: [batch, length] and [batch, kv_length] int32, or None.
        sinks: Scores of the heads' sinks, or None.
        over_context: Whether length is split over `context`, here or by a region around; otherwise
            it is whole.
        whole_mesh: Whether every mesh axis is manual, including axes that split nothing or have one
            device. A kernel that cannot be partitioned needs this.
    """
    scope = active()
    if scope is None:
        return local(query, key, value, segments, sinks)
    batch, heads, kv_heads = cut_by_rules(scope, query.shape, key.shape)
    length = AXIS if over_context and row_parts() == 1 else None
    axes = entry_axes(batch) + entry_axes(length) + entry_axes(heads)
    if whole_mesh and math.prod(mesh_sizes(scope.mesh).values()) > 1:
        axes = tuple(name for name in scope.sizes if name not in manual_axes())
    elif all(scope.sizes[name] == 1 for name in axes):
        axes = ()
    if not axes:
        return local(query, key, value, segments, sinks)

    devices = math.prod(scope.sizes[name] for name in entry_axes(heads))
    needed = kv_heads_of(query.shape[2], key.shape[2], devices)

    def on_device(
        query: jax.Array, key: jax.Array, value: jax.Array, ids: Any, sinks: Any
    ) -> jax.Array:
        if heads is not None and kv_heads != heads:
            mine = jnp.asarray(needed)[jax.lax.axis_index(entry_axes(heads))]
            key, value = (jnp.take(x, mine, axis=2, mode="clip") for x in (key, value))
        return local(query, key, value, ids, sinks)

    split = P(batch, length, heads, None)
    kv_split = P(batch, length, kv_heads if kv_heads == heads else None, None)
    rows = tuple(None if ids is None else P(batch, length) for ids in segments)
    of_sinks = None if sinks is None else P(heads)
    region = manual(on_device, axes, (split, kv_split, kv_split, rows, of_sinks), split)
    return region(query, key, value, segments, sinks)


def cut_by_rules(
    scope: Scope, query_shape: tuple[int, ...], key_shape: tuple[int, ...]
) -> tuple[Any, Any, Any]:
    """Returns the entries of a `PartitionSpec` by which the rules cut rows, query heads and
    key-value heads."""
    names = ("batch", None, "heads", "head_dim")
    batch, _, heads, _ = scope.sharding(names, query_shape, "activations").spec
    names = ("batch", None, "kv_heads", "head_dim")
    return batch, heads, scope.sharding(names, key_shape, "activations").spec[2]
