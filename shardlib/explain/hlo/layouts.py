"""Device memory of an array of a compiled program: its padding and its memory space.

Layouts are written as `bf16[64,128]{1,0:T(8,128)(2,1)S(1)}`: dims from the fastest to the slowest,
the tiles of a TPU, and the memory space. Source: XLA's `Layout::ToString`, and "Tiled layout" in
the documentation of XLA.
"""

import math
import re

from shardlib.explain.hlo.text import array_bytes

_LEAF = re.compile(r"\s*([a-z]+\d*\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::(.*))?\})?\s*$")
_HOST = 5
"""Memory space of the host on every platform."""


def memory_space(shape: str) -> int:
    """Returns the memory space of an array; 0 is device memory."""
    space = re.search(r"S\((\d+)\)", shape)
    return int(space[1]) if space else 0


def device_bytes(shape: str, *, tiled: bool) -> int:
    """Returns the bytes of device memory of one array, padding included.

    On a TPU (`tiled`) every memory space except 0 is on-chip or on the host. On other platforms
    only host memory is separate: the collective memory of a GPU is part of device memory.
    """
    space = memory_space(shape)
    if space == _HOST or (tiled and space):
        return 0
    return padded_bytes(shape)


def padded_bytes(shape: str) -> int:
    """Returns the bytes of one array with its minor dims padded to the first tile.

    Padding is left out if the layout cannot be parsed.
    """
    leaf = _LEAF.match(shape)
    tile = re.match(r"T\(([\d,]+)\)", leaf[4] or "") if leaf else None
    if leaf is None or tile is None:
        return array_bytes(shape)
    dims = [int(dim.removeprefix("<=")) for dim in leaf[2].split(",") if dim]
    order = [int(dim) for dim in leaf[3].split(",") if dim]
    sides = [int(side) for side in tile[1].split(",")]
    if sorted(order) != list(range(len(dims))):
        return array_bytes(shape)
    physical = [dims[dim] for dim in reversed(order)]
    physical = [1] * (len(sides) - len(physical)) + physical
    for back, side in enumerate(reversed(sides), start=1):
        physical[-back] = -(-physical[-back] // side) * side
    count = math.prod(dims)
    return array_bytes(f"{leaf[1]}[{math.prod(physical)}]") if count else 0
