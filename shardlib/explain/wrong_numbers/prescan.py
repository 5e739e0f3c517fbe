"""Quick scans of a program's text, which save most of the work of reading it."""

import itertools
import math
import re
from collections.abc import Mapping

import jax
from jax.extend.core import ClosedJaxpr

from shardlib.explain.analysis.equations import equations, manual_devices
from shardlib.explain.analysis.explicit import is_explicit

_MOVED = r"collective-permute|all-to-all|ragged-all-to-all"
# Reading a program with thousands of layers is expensive. Scanning the relevant lines costs a
# hundredth of that: most programs lack the operations that the known faults need.
_LINE = re.compile(
    rf"^.*(?: (?:{_MOVED})(?:-start)?\(|/(?:conv_general_dilated|select_and_scatter|pad)\"| "
    r"(?:multiply|partition-id|all-[a-z]+|reduce-scatter)\(.*/dynamic_slice\").*$",
    re.MULTILINE,
)
_SLICED = re.compile(r" partition-id\((?!.*(?:axis_index|shard_map))")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CLAMPED = (0, 12)
"""The first version of JAX that clamps a dynamic slice of a sharded dim."""


def is_suspect(text: str, mesh: Mapping[str, int], jaxpr: ClosedJaxpr | None = None) -> bool:
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
        name = _OP_NAME.search(line[0])
        operation = name[1] if name else ""
        is_mended = operation.endswith("/dynamic_slice") and jax.__version_info__ >= _CLAMPED
        if is_explicit(operation) or is_mended:
            continue
        if "shard_map" not in operation:
            return True
        in_region = True
    return in_region and not _handle_all(jaxpr, math.prod(mesh.values()))


def _handle_all(jaxpr: ClosedJaxpr | None, devices: int) -> bool:
    """Whether every manual region of a program is manual over all mesh axes."""
    if jaxpr is None:
        return False
    regions = [
        placed.devices * manual_devices(placed.equation)
        for placed in equations(jaxpr)
        if placed.equation.primitive.name == "shard_map"
    ]
    return set(regions) == {devices}


_METADATA = re.compile(r', metadata=\{op_name="(?:[^"]*/)?([^"/]*)"[^}]*\}')
_VALUE_NAME = re.compile(r"%([^ ,)}\n]+)")
_END = "\n}\n"
_PLACED = ("replica_groups=", "source_target_pairs=", "shard_map")
"""Marks in the text of computations that are always kept: collectives and manual regions."""


def without_copies(text: str) -> tuple[str, Mapping[str, str]]:
    """Returns the text of a program without the copies of earlier computations, and the kept
    computation that stands for each of them.

    A program of many layers repeats the fused computations of a layer. Their texts are equal except
    for the numbers in names. Comparing texts is faster than reading them. A computation with
    collectives, or in a manual region, is kept.
    """
    first: dict[tuple, str] = {}
    stands_for: dict[str, str] = {}
    kept = []
    for part in text.split(_END):
        head, _, body = part.rpartition(" {\n")
        own = head.rpartition("\n")[2].partition(" ")[0].removeprefix("%")
        if own in ("", "ENTRY") or any(mark in body for mark in _PLACED):
            kept.append(part)
            continue
        stands_for[own] = first.setdefault(_but_for_names(body, stands_for), own)
        if stands_for[own] == own:
            kept.append(part)
    return _END.join(kept), stands_for


def _but_for_names(body: str, stands_for: Mapping[str, str]) -> tuple:
    """Returns a key that two bodies share if they differ only in names of values.

    A called computation appears under the name of the one that stands for it.
    """
    # The last part of an operation's JAX name identifies the operation.
    pieces = _VALUE_NAME.split("".join(_METADATA.split(body)))
    names = pieces[1::2]
    numbers = dict(zip(dict.fromkeys(names), itertools.count(), strict=False))
    called = map(stands_for.get, numbers)
    return (*pieces[0::2], None, *map(numbers.__getitem__, names), *called)
