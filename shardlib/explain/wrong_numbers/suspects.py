"""Quick scan for the operations that the known faults need. Most programs lack them.

Reading a program with thousands of layers is expensive. Scanning the relevant lines costs a
hundredth of that.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from shardlib.explain.analysis.equations import equations, manual_devices
from shardlib.explain.analysis.explicit import is_explicit

_MOVED = r"collective-permute|all-to-all|ragged-all-to-all"
_LINE = re.compile(
    rf"^.*(?: (?:{_MOVED})(?:-start)?\(|/(?:conv_general_dilated|select_and_scatter|pad)\"| "
    r"(?:multiply|partition-id|all-[a-z]+|reduce-scatter)\(.*/dynamic_slice\").*$",
    re.MULTILINE,
)
_SLICED = re.compile(r" partition-id\((?!.*(?:axis_index|shard_map))")
_NAME = re.compile(r'op_name="([^"]*)"')
_CLAMPED = (0, 12)
"""The first version of JAX that clamps a dynamic slice of a sharded dim."""


def is_suspect(text: str, mesh: Mapping[str, int], jaxpr: Any = None) -> bool:
    """Whether the text of a program is worth reading.

    Rows are reordered by a permutation or an exchange that the compiler inserted. If a contraction
    is sharded over one mesh axis and the rows over two others, a slice of a sum can also reorder
    them. Sums count copies only with convolutions. The other faults need pools, pads or dynamic
    slices. Explicit collectives of a manual region are the user's own. The compiler partitions
    nothing in a region that is manual over all mesh axes, which only `jaxpr` shows.
    """
    if sum(size > 1 for size in mesh.values()) > 2 and _SLICED.search(text):
        return True
    in_region = False
    for line in _LINE.finditer(text):
        name = _NAME.search(line[0])
        operation = name[1] if name else ""
        is_mended = operation.endswith("/dynamic_slice") and jax.__version_info__ >= _CLAMPED
        if is_explicit(operation) or is_mended:
            continue
        if "shard_map" not in operation:
            return True
        in_region = True
    return in_region and not _handle_all(jaxpr, math.prod(mesh.values()))


def _handle_all(jaxpr: Any, devices: int) -> bool:
    """Whether every manual region of a program is manual over all mesh axes."""
    if jaxpr is None:
        return False
    regions = [
        placed.devices * manual_devices(placed.equation)
        for placed in equations(jaxpr)
        if placed.equation.primitive.name == "shard_map"
    ]
    return set(regions) == {devices}
