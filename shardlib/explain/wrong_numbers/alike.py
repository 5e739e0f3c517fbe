"""Computations that differ in their names alone, so that one of them is read for all.

A program of many layers has the fused computations of each of them again. They are the same text
but for the numbers in their names, which is seen faster than the text is read.
"""

import re
from collections.abc import Mapping

_NAME = re.compile(r', metadata=\{op_name="(?:[^"]*/)?([^"]*)"[^}]*\}|%([\w.\-]+)')
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
        name = re.search(r"%([\w.\-]+) [^%]*$|%([\w.\-]+) \(", head.rpartition("\n")[2])
        if name is None or "ENTRY " in head or any(mark in body for mark in _PLACED):
            kept.append(part)
            continue
        own = name[1] or name[2]
        stands_for[own] = first.setdefault(_but_for_names(body, stands_for), own)
        if stands_for[own] == own:
            kept.append(part)
    return _END.join(kept), stands_for


def _but_for_names(body: str, stands_for: Mapping[str, str]) -> tuple:
    """Returns a key that two bodies share where they are one another with other names of values. A
    computation that is called has the name of the one that stands for it."""
    pieces = _NAME.split(body)
    names = pieces[2::3]
    numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
    order = map(numbers.__getitem__, names)
    called = map(stands_for.get, numbers)
    return tuple(pieces[0::3]), tuple(pieces[1::3]), tuple(order), tuple(called)
