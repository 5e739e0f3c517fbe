"""The bytes that each host reads to restore a checkpoint onto a mesh, which may be abstract."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from shardlib.errors import MeshError
from shardlib.mesh import describe, entry_axes, mesh_sizes


@dataclasses.dataclass(frozen=True)
class HostReads:
    """The bytes that one host reads, holds and buffers in a restore.

    Attributes:
        read_bytes: Bytes read from storage. Storage returns whole chunks, and a host reads each
            distinct shard once, however many of its devices hold it.
        held_bytes: Bytes on the devices of the host after the restore.
        buffer_bytes: Peak bytes in host memory on the way to the devices.
    """

    read_bytes: int
    held_bytes: int
    buffer_bytes: int


def plan_reads(
    targets: Mapping[str, Any],
    chunks: Mapping[str, Sequence[int]],
    *,
    num_hosts: int,
    read_bound: Callable[[int], int],
) -> list[HostReads]:
    """Returns the bytes that each host reads, holds and buffers to restore arrays.

    Args:
        targets: Shapes and dtypes by path, with a `NamedSharding` on a mesh that may be abstract.
            Its devices are split evenly over the hosts, in mesh order.
        chunks: Chunk shapes of the stored arrays, by path.
        num_hosts: Number of hosts that share the devices.
        read_bound: Returns the most bytes that a host keeps in flight, unless one shard is larger,
            from the bytes that the host will hold.

    Raises:
        MeshError: If the hosts do not divide the devices.
    """
    if not targets:
        return [HostReads(0, 0, 0)] * num_hosts
    mesh = next(iter(targets.values())).sharding.mesh
    if math.prod(mesh_sizes(mesh).values()) % num_hosts:
        raise MeshError(
            f"{num_hosts} hosts cannot share the devices of mesh {describe(mesh)} evenly.\n"
            "  Name a number of hosts that divides them."
        )
    read, held = np.zeros(num_hosts, np.int64), np.zeros(num_hosts, np.int64)
    largest = 0
    for path, target in targets.items():
        shard_shape = target.sharding.shard_shape(target.shape)
        footprints = _footprints(target.shape, shard_shape, chunks[path])
        shard_of = _shard_of_device(target.sharding).reshape(num_hosts, -1)
        itemsize = np.dtype(target.dtype).itemsize
        for host, shards in enumerate(shard_of):
            read[host] += itemsize * sum(footprints[shard] for shard in set(shards.tolist()))
        shard_bytes = itemsize * math.prod(shard_shape)
        held += shard_bytes * shard_of.shape[1]
        largest = max(largest, itemsize * max(footprints))
    return [
        HostReads(int(r), int(h), int(min(r, max(read_bound(int(h)), largest))))
        for r, h in zip(read, held, strict=True)
    ]


def _shard_of_device(sharding: NamedSharding) -> np.ndarray:
    """Returns the shard index of each device, with devices in mesh order.

    Shards are numbered in row-major order.
    """
    sizes = mesh_sizes(sharding.mesh)
    position = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    shard = np.zeros(tuple(sizes.values()), np.int64)
    for name in itertools.chain.from_iterable(entry_axes(entry) for entry in sharding.spec):
        shard = shard * sizes[name] + position[name]
    return shard.reshape(-1)


def _footprints(
    shape: Sequence[int], shard_shape: Sequence[int], chunk: Sequence[int]
) -> list[int]:
    """Returns the number of elements read from storage for each shard, in whole chunks."""
    counts = []
    for size, shard, step in zip(shape, shard_shape, chunk, strict=True):
        starts = np.arange(0, size, shard)
        counts.append((-(-(starts + shard) // step) - starts // step).tolist())
    chunk_elements = math.prod(chunk)
    return [chunk_elements * math.prod(combination) for combination in itertools.product(*counts)]
