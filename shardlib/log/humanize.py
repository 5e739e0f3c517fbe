"""Formatting of numbers for people."""

import math


def count(number: float) -> str:
    """Returns a count with three digits and an SI prefix: `1.23 M`, `950`, `7.5 k`."""
    if not math.isfinite(number):
        return str(number)
    prefixes = ["", " k", " M", " G", " T", " P", " E"]
    for prefix in prefixes:
        text = _three_digits(number, whole=not prefix)
        if float(text) < 1000 or prefix == prefixes[-1]:
            return text + prefix
        number /= 1000
    raise AssertionError


def flops(number: float) -> str:
    """Returns a number of floating-point operations: `12.0 TFLOP`."""
    text, _, prefix = count(number).partition(" ")
    return f"{text} {prefix}FLOP"


def size(num_bytes: float) -> str:
    """Returns bytes with three digits and a binary prefix: `3.40 GiB`, `512 B`."""
    prefixes = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    for prefix in prefixes:
        text = _three_digits(num_bytes, whole=prefix == "B")
        if float(text) < 1024 or prefix == prefixes[-1]:
            return f"{text} {prefix}"
        num_bytes /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """Returns a time as `0:07`, `12:34`, `1:02:03` or `3d 04:05`."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def value(number: float) -> str:
    """Returns a metric with four significant digits: `2.345`, `0.0123`, `1.2e-05`, `nan`."""
    if not math.isfinite(number):
        return str(float(number))
    if number == 0 or 1e-3 <= abs(number) < 1e5:
        return f"{number:#.4g}".rstrip(".")
    return f"{number:.1e}"


def _three_digits(number: float, *, whole: bool) -> str:
    if whole and float(number).is_integer():
        return f"{number:.0f}"
    magnitude = math.floor(math.log10(abs(number))) if number else 0
    return f"{number:.{min(2, max(0, 2 - magnitude))}f}"
