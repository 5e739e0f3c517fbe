"""The memory that the cache of an engine needs, against what its devices have free."""

import math
from typing import Any

import jax

from shardlib.engine.sizes import EngineSizes
from shardlib.errors import DoesNotFitError
from shardlib.hardware.free_memory import free_bytes
from shardlib.humanize import gib

_SCALES = 1.25
"""Bytes of a number in 8 bits with its part of a scale in float32, which at least 16 share."""


def check_room(state: Any, sizes: EngineSizes) -> None:
    """Raises `DoesNotFitError` if an empty cache does not fit the free memory of a device.

    Args:
        state: The cache, as `ShapeDtypeStruct`s with shardings.
        sizes: The sizes that it was made for.
    """
    leaves = jax.tree.leaves(state)
    mine = sorted(leaves[0].sharding.addressable_devices, key=lambda device: device.id)
    free = free_bytes(mine)
    needed = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    if free is None or needed <= free:
        return
    slots = sizes.slots * sizes.groups
    pages = int(sizes.num_pages * free / needed)
    tokens = pages * sizes.page_size
    fixes = (
        [f"  Give at most {pages * sizes.groups} pages, which all requests share."]
        if pages > 1
        else []
    )
    if tokens // sizes.slots >= sizes.page_size:
        fixes.append(f"  Give a context of at most {tokens // sizes.slots:,} tokens.")
    if sizes.cache is None and needed / leaves[0].dtype.itemsize * _SCALES <= free:
        fixes.append("  Keep keys and values in 8 bits: cache='int8' (--cache int8).")
    raise DoesNotFitError(
        f"the cache needs {gib(needed)} on a device for {slots} requests at once of "
        f"{sizes.context:,} tokens, and {mine[0]} has {gib(free)} free.\n"
        + "\n".join(fixes or ["  Serve it on more devices."]),
        needed,
    )
