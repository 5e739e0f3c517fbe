"""Whether a program holds what the known faults need: most hold none of it, and are not read.

Reading a program costs much for one of thousands of layers; a look at the lines that could matter
costs a hundredth of that.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from shardlib.explain.equations import equations, manual_devices
from shardlib.explain.explicit import is_explicit

_MOVED = r"collective-permute|all-to-all|ragged-all-to-all"
_LINE = re.compile(
    rf"^.*(?: (?:{_MOVED})(?:-start)?\(|/(?:conv_general_dilated|select_and_scatter|pad)\"| "
    r"(?:multiply|partition-id|all-[a-z]+|reduce-scatter)\(.*/dynamic_slice\").*$",
    re.MULTILINE,
)
_SLICED = re.compile(r" partition-id\((?!.*(?:axis_index|shard_map))")
_NAME = re.compile(r'op_name="([^"]*)"')
_CLAMPED = (0, 12)
"""The version of JAX from which on a dynamic slice of a cut dim is clamped."""


def is_suspect(text: str, mesh: Mapping[str, int], jaxpr: Any = None) -> bool:
    """Whether the text of a program is worth reading.

    Rows change their order by a permutation or an exchange that the compiler made, or, where a
    contraction has one axis of the mesh and rows two others, by a slice of a sum; sums count
    copies where there are convolutions; the other faults are of pools, pads and dynamic slices.
    What a manual region calls by name is the user's own. Of one that handles all axes, as `jaxpr`
    tells, nothing is partitioned.
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
    """Whether each manual region of a program handles all axes of the mesh."""
    if jaxpr is None:
        return False
    regions = [
        placed.devices * manual_devices(placed.equation)
        for placed in equations(jaxpr)
        if placed.equation.primitive.name == "shard_map"
    ]
    return set(regions) == {devices}
