"""Free memory of the devices of this process."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(devices: Sequence[Any]) -> int | None:
    """Returns the bytes that each of some devices of this process can still allocate, of the one
    with the least; None if unknown. CPU devices share the memory that Linux calls available, or
    what the limit of a container leaves of it."""
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in one for one in stats):
        return min((one["bytes_limit"] - one["bytes_in_use"] for one in stats), default=None)
    if any(device.platform != "cpu" for device in devices):
        return None
    left = [one for one in (_available(), left_by_limit(_CGROUP)) if one is not None]
    return min(left) // len(devices) if left else None


def _available() -> int | None:
    found = _numbers(_MEMINFO) if _MEMINFO.exists() else {}
    return found["MemAvailable:"] * 1024 if "MemAvailable:" in found else None


def left_by_limit(folder: Path) -> int | None:
    """Returns the bytes that the limit of a control group leaves; None if it has no limit. Cached
    files do not count: Linux drops them.

    Args:
        folder: The group, in the file system of version 2.

    Source: the Linux kernel's "Control Group v2", Memory Interface Files.
    """
    try:
        limit, used = ((folder / f"memory.{name}").read_text() for name in ("max", "current"))
        stat = _numbers(folder / "memory.stat")
        return int(limit) - int(used) + stat["file"] - stat["shmem"]
    except (OSError, ValueError, KeyError):  # The root has no such files, and a limit may be "max".
        return None


def _numbers(file: Path) -> dict[str, int]:
    """Returns the first number of each line of a file by the word before it."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
