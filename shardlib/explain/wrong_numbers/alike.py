"""Removal of computations that differ only in names, so that one of them is read for all.

A program of many layers repeats the fused computations of a layer. Their texts are equal except for
the numbers in names. Comparing texts is faster than reading them.
"""

import itertools
import re
from collections.abc import Mapping

_METADATA = re.compile(r', metadata=\{op_name="(?:[^"]*/)?([^"/]*)"[^}]*\}')
_NAME = re.compile(r"%([^ ,)}\n]+)")
_END = "\n}\n"
_PLACED = ("replica_groups=", "source_target_pairs=", "shard_map")
"""Marks in the text of computations that are always kept: collectives and manual regions."""


def without_copies(text: str) -> tuple[str, Mapping[str, str]]:
    """Returns the text of a program without the copies of earlier computations, and the kept
    computation that stands for each of them.

    A computation with collectives, or in a manual region, is kept.
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
    pieces = _NAME.split("".join(_METADATA.split(body)))
    names = pieces[1::2]
    numbers = dict(zip(dict.fromkeys(names), itertools.count(), strict=False))
    called = map(stands_for.get, numbers)
    return (*pieces[0::2], None, *map(numbers.__getitem__, names), *called)
