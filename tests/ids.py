"""What the id of a test may hold.

Workers that share out tests collect them each for itself and must find the same ids, which a time
or an address in one of them prevents. pytest writes bytes and what cannot be printed as escapes.
"""

import re
from collections.abc import Iterable

LONGEST = 160
"""Characters of the part in brackets."""

_NOT_ALLOWED = {
    "bytes": re.compile(r"\\[xuU][0-9a-f]{2}"),
    "an address": re.compile(r"\b0x[0-9a-f]{6,}|<[\w.]+ object\b", re.IGNORECASE),
    # A date with a clock, a clock, or seconds since 1970 from this century's years 2017 to 2033.
    "a time": re.compile(r"\d{4}-\d\d-\d\d[T ]\d|\d\d:\d\d:\d\d|(?<![\d.])1[5-9]\d{8}(?!\d)"),
}


def faulty_ids(ids: Iterable[str]) -> list[str]:
    """Returns a line for each id that may not be, with what is wrong with it."""
    return [f"{_shown(name)}: {fault}" for name in ids if (fault := _fault(name))]


def _fault(name: str) -> str:
    inside = name.partition("[")[2].removesuffix("]")
    if not inside.isprintable():
        return "it holds what cannot be printed"
    for what, pattern in _NOT_ALLOWED.items():
        if pattern.search(inside):
            return f"it holds {what}"
    if len(inside) > LONGEST:
        return f"its part in brackets has {len(inside)} characters, more than {LONGEST}"
    return ""


def _shown(name: str) -> str:
    start, _, inside = (name if name.isprintable() else ascii(name)[1:-1]).partition("[")
    return f"{start}[{inside}" if len(inside) <= 40 else f"{start}[{inside[:40]}...]"
