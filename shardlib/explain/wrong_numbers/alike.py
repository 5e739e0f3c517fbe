"""Computations that differ in their names alone, so that one of them is read for all.

A program of many layers has the fused computations of each of them again. They are the same text
but for the numbers in their names, which is seen faster than the text is read.
"""

import itertools
import re
from collections.abc import Mapping

_METADATA = re.compile(r', metadata=\{op_name="(?:[^"]*/)?([^"/]*)"[^}]*\}')
_NAME = re.compile(r"%([^ ,)}\n]+)")
_END = "\n}\n"
_PLACED = ("replica_groups=", "source_target_pairs=", "shard_map")
"""What is told by its own place, in marks that its text holds."""


def without_copies(text: str) -> tuple[str, Mapping[str, str]]:
    """Returns the text of a program without the computations that are copies of an earlier one, and
    which one stands for each of them.

    A computation with collectives, or one of a manual region, is kept.
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
    """Returns a key that two bodies share where they are one another with other names of values. A
    computation that is called has the name of the one that stands for it."""
    # Of the name that JAX gave an operation, the last word tells what it is.
    pieces = _NAME.split("".join(_METADATA.split(body)))
    names = pieces[1::2]
    numbers = dict(zip(dict.fromkeys(names), itertools.count(), strict=False))
    called = map(stands_for.get, numbers)
    return (*pieces[0::2], None, *map(numbers.__getitem__, names), *called)
