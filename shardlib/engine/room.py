"""The memory that the cache of an engine needs, against what its devices have free, and memory of
the host that nothing uses."""

import ctypes
import math
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlib.engine.sizes import EngineSizes
from shardlib.errors import DoesNotFitError
from shardlib.hardware.free_memory import free_bytes
from shardlib.humanize import gib

_SCALES = 1.25
"""Bytes of a number in 8 bits with its part of a scale in float32, which at least 16 share."""


def check_room(state: Any, sizes: EngineSizes, free: float) -> None:
    """Raises `DoesNotFitError` if an empty cache does not fit the free memory of a device.

    Args:
        state: The cache, as `ShapeDtypeStruct`s with shardings.
        sizes: The sizes that it was made for.
        free: The free bytes of each device.
    """
    leaves = jax.tree.leaves(state)
    needed = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    if needed <= free:
        return
    # One page more is in the cache, which nothing reads.
    pages = max(int(sizes.num_pages * free / needed) - 1, 0)
    context = pages // sizes.slots * sizes.page_size
    fixes = []
    if pages >= sizes.pages_a_row:
        fixes.append(f"  Give at most {pages * sizes.groups} pages, which all requests share.")
    if context and sizes.num_pages == 1 + sizes.slots * sizes.pages_a_row:
        fixes.append(f"  Give a context of at most {context:,} tokens.")
    if sizes.cache is None and needed / leaves[0].dtype.itemsize * _SCALES <= free:
        fixes.append("  Keep keys and values in 8 bits: cache='int8' (--cache int8).")
    raise DoesNotFitError(
        f"the cache needs {gib(needed)} on a device for {sizes.slots * sizes.groups} requests at "
        f"once of {sizes.context:,} tokens, but {gib(free)} are free.\n"
        + "\n".join(fixes or ["  Serve it on more devices."]),
        needed,
    )


def least_free(sharding: jax.sharding.Sharding) -> float:
    """Returns the free bytes of the device with the least, the same in every process; infinity if
    they are unknown."""
    free = free_bytes(list(sharding.addressable_devices))
    least = math.inf if free is None else float(free)
    if sharding.is_fully_addressable:
        return least
    return float(np.min(multihost_utils.process_allgather(np.float32(least))))


def return_unused() -> None:
    """Returns to the system what the C library keeps of memory that was freed, such as that of
    compilation and of loading. Does so with glibc alone (malloc_trim(3))."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)
