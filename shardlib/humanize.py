"""Numbers as text for people: bytes, durations, counts. Nothing else in shardlib formats them."""

import itertools
import math
from collections.abc import Iterable


def size(num_bytes: float) -> str:
    """Returns bytes with a binary unit: `512 B`, `3.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if round(num_bytes, 1) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def gib(num_bytes: float) -> str:
    """Returns bytes in GiB, for columns that are compared: `4.2 GiB`, `0.0 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


def bandwidth(bytes_per_second: float) -> str:
    """Returns bytes a second with the decimal unit of vendors: `31.5 GB/s`, `3,350 GB/s`."""
    number = _three_digits(bytes_per_second / 1e9)
    return f"{number:,.0f} GB/s" if number >= 100 else f"{number:.3g} GB/s"


def duration(seconds: float) -> str:
    """Returns a time with its unit: `176 µs`, `12.3 ms`, `4.56 s`, `3.2 hours`, `30.1 days`."""
    if not math.isfinite(seconds):
        return "?"
    for unit, name in ((86400, "days"), (3600, "hours")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    rounded = _three_digits(seconds)
    if 0 < rounded < 1e-3:
        return f"{rounded * 1e6:.3g} µs"
    return f"{rounded * 1e3:.3g} ms" if 0 < rounded < 1 else f"{seconds:,.4g} s"


def clock(seconds: float) -> str:
    """Returns a time as `0:07`, `12:34`, `1:02:03` or `3d 04:05`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def count(number: float) -> str:
    """Returns a count with three digits: `950`, `7.5K`, `1.23M`, `8.03B`."""
    number = _three_digits(number)
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(number) >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


def flops(number: float) -> str:
    """Returns a number of floating-point operations: `12.3 TFLOP`."""
    number = _three_digits(number)
    for unit, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.3g} {name}FLOP"
    return f"{number:.3g} FLOP"


def value(number: float) -> str:
    """Returns a metric with four significant digits: `2.345`, `0.0123`, `1.2e-05`, `nan`."""
    if not math.isfinite(number):
        return str(float(number))
    if number == 0 or 1e-3 <= abs(number) < 1e5:
        return f"{number:#.4g}".rstrip(".")
    return f"{number:.1e}"


def plural(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 file`, `2 files`, `3 losses`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def repeats(numbers: Iterable[int]) -> str:
    """Returns numbers as text, with equal neighbours together: `15, 6 x 16, 15`."""
    groups = ((number, len([*group])) for number, group in itertools.groupby(numbers))
    return ", ".join(
        f"{count} x {number}" if count > 1 else f"{number}" for number, count in groups
    )


def _three_digits(number: float) -> float:
    """Rounds before a unit is chosen: 999,999 is `1M`, not `1e+03K`."""
    return float(f"{number:.3g}")
