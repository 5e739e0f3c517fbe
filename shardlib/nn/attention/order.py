"""Layouts of the positions of a row over the devices of a mesh axis.

A causal query sees all keys before it, so with chunks in contiguous order the last device has the
most work. In zig-zag order device i of C holds chunks i and 2C - 1 - i of 2C, an early and a late
one. Every device then has the same amount of work, at every step of a ring too.

Source: the zig-zag of context parallelism in Grattafiori et al. 2024, "The Llama 3 Herd of Models",
section 3.3.2; Brandon et al. 2023, "Striped Attention", for the imbalance.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.errors import ModelError
from shardlib.mesh import mesh_sizes
from shardlib.nn.attention.mask import Mask, cut_places, places
from shardlib.nn.attention.tiles import tile_size
from shardlib.sharding.constrain import active
from shardlib.sharding.manual import axis_size
from shardlib.sharding.shared_rows import opaque, proof_scope, row_parts

Order = Literal["contiguous", "zigzag"]

AXIS = "context"


def zigzag(x: jax.Array, dim: int = 1) -> jax.Array:
    """Returns `x` with `dim` reordered so that shard i of C over `context` holds chunks i and
    2C - 1 - i of 2C. It is the identity if the active mesh has no `context` axis.

    It gathers `x` along `dim`, so reorder token ids rather than activations.

    Raises:
        ModelError: If `dim` does not divide into 2C chunks.
    """
    return _chunks_taken(x, dim, chunk_order(_row_shards()))


def unzigzag(x: jax.Array, dim: int = 1) -> jax.Array:
    """Reverses `zigzag`."""
    return _chunks_taken(x, dim, np.argsort(chunk_order(_row_shards())))


def positions(length: int, order: Order = "contiguous") -> jax.Array:
    """Returns the positions of a row of `length` tokens in `order`: [1, length] int32.

    A model whose devices may share a row asks for them here. `jnp.arange(length)` is the same where
    the code sees whole rows, but not in a region in which each device sees a part.
    """
    if proof_scope() is not None:
        result = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return opaque(("positions", order), (), result)
    if row_parts() > 1:
        shards = row_parts()
        return jnp.asarray(row_positions(order, jax.lax.axis_index(AXIS), shards, length))
    row = jnp.arange(length, dtype=jnp.int32)[None]
    return zigzag(row) if order == "zigzag" else row


def _row_shards() -> int:
    """Returns the number of devices that share a row."""
    scope = proof_scope()
    if scope is not None:
        return mesh_sizes(scope.mesh).get(AXIS, 1)
    return row_parts() if row_parts() > 1 else axis_size(AXIS)


def chunk_order(shards: int) -> np.ndarray:
    """Returns the indices of the chunks in zig-zag order: [2 * shards] int."""
    first = np.arange(shards)
    return np.stack([first, 2 * shards - 1 - first], axis=1).reshape(-1)


def take_chunks(x: jax.Array, dim: int, chunks: np.ndarray) -> jax.Array:
    """Returns `x` with the chunks of `dim` reordered."""
    if np.array_equal(chunks, np.arange(len(chunks))):
        return x
    cut = x.reshape(*x.shape[:dim], len(chunks), -1, *x.shape[dim + 1 :])
    return jnp.take(cut, chunks, axis=dim, mode="clip").reshape(x.shape)


def _chunks_taken(x: jax.Array, dim: int, chunks: np.ndarray) -> jax.Array:
    scope, dim = proof_scope() or active(), dim % x.ndim
    if scope is None or len(chunks) == 2:
        return x
    if proof_scope() is not None:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return opaque(("chunks", tuple(chunks.tolist())), (x,), result, dim)
    if row_parts() > 1:
        return _own_chunks(x, dim, chunks)
    if x.shape[dim] % len(chunks):
        raise ModelError(
            f"dim {dim} of {x.shape} does not divide into the {len(chunks)} chunks of zig-zag "
            f"order over {AXIS}={len(chunks) // 2}.\n"
            f"  Use a length that is a multiple of {len(chunks)}, or order='contiguous'."
        )
    # Gathered in groups along the axis: otherwise the compiler may permute between shards, and a
    # collective-permute must not be in code that only some devices run.
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    entries[dim] = None
    whole = NamedSharding(scope.mesh_here, PartitionSpec(*entries))  # type: ignore[arg-type]
    taken = take_chunks(jax.lax.with_sharding_constraint(x, whole), dim, chunks)
    entries[dim] = AXIS
    split = NamedSharding(scope.mesh_here, PartitionSpec(*entries))  # type: ignore[arg-type]
    return jax.lax.with_sharding_constraint(taken, split)


def _own_chunks(x: jax.Array, dim: int, chunks: np.ndarray) -> jax.Array:
    """Returns this device's chunks of a row, from the device's part, in a manual region."""
    row = jax.lax.all_gather(x, AXIS, axis=dim, tiled=True)
    start = jax.lax.axis_index(AXIS) * x.shape[dim]
    return jax.lax.dynamic_slice_in_dim(
        take_chunks(row, dim, chunks), start, x.shape[dim], axis=dim
    )


def row_positions(order: Order, shard: Any, shards: int, length: int) -> Any:
    """Returns the positions in the row of one shard of `length`: [1, length] int32.

    The result is a NumPy array if `shard` is concrete, and a JAX array if it is traced.
    """
    ramp = np.arange(length, dtype=np.int32)[None]
    if order == "contiguous":
        return ramp + shard * length
    half = length // 2
    late = ramp // half
    return ramp % half + half * ((1 - late) * shard + late * (2 * shards - 1 - shard))


def hops(order: Order, mask: Mask, shards: int, length: int) -> int:
    """Returns the number of hops of the keys in a ring over shards of `length` positions: to every
    other device, or, in contiguous order, as far as the window reaches."""
    if mask.window is None or order == "zigzag":
        return shards - 1
    return min(shards - 1, -(-(mask.window - 1) // length))


def scores_per_device(
    length: int,
    shards: int,
    order: Order,
    *,
    causal: bool = True,
    window: int | None = None,
) -> list[list[int]]:
    """Returns the number of scores that each device computes at each ring step, for one head.

    The count is of whole tiles: hidden pairs in a visited tile are computed too. It follows from
    `row_positions` and `Mask.tiles`, which the ring itself uses.

    Args:
        length: Positions of the whole row.
        shards: Devices along `context`.
        order: The order of the row over the devices.
        causal: As in `attend`.
        window: As in `attend`.

    Returns:
        A list for each device: the number of scores at its own keys, then after each hop.
    """
    mask = Mask(causal, window)
    here = length // shards
    tile = ring_tile(order, here)
    if length % shards or tile is None:
        raise ModelError(
            f"a row of {length} positions cannot be split over {shards} devices in {order} order.\n"
            f"  Use a length that is a multiple of {2 * shards}."
        )
    shard = [
        cut_places(places(here, row_positions(order, i, shards, here), None), tile)
        for i in range(shards)
    ]
    steps = range(hops(order, mask, shards, here) + 1)
    return [
        [int(mask.tiles(shard[i], shard[(i - step) % shards]).sum()) * tile**2 for step in steps]
        for i in range(shards)
    ]


def ring_tile(order: Order, length: int) -> int | None:
    """Returns the tile for a shard of `length` positions, which crosses no chunk border; None if
    the length allows none."""
    if order == "zigzag" and length % 2:
        return None
    return tile_size(length if order == "contiguous" else length // 2)
