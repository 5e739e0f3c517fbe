"""Free memory of the devices of this process."""

from collections.abc import Sequence
from pathlib import Path

import jax

_MEMINFO = Path("/proc/meminfo")


def free_bytes(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes that each of some devices of this process can still allocate, of the one
    with the least; None if unknown. CPU devices share the memory that Linux calls available."""
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in one for one in stats):
        return min((one["bytes_limit"] - one["bytes_in_use"] for one in stats), default=None)
    if any(device.platform != "cpu" for device in devices) or not _MEMINFO.exists():
        return None
    for line in _MEMINFO.read_text().splitlines():
        name, _, size = line.partition(":")
        if name == "MemAvailable":
            return int(size.split()[0]) * 1024 // len(devices)
    return None
