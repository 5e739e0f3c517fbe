"""Curves drawn with characters: braille dots, blocks or plain ASCII."""

import math
from collections.abc import Sequence

from shardlib import humanize

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.-=+*#@"
# Unicode 15.0, chapter 21.1: the bit of each of the 2 x 4 dots of a braille character.
_BRAILLE = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def resample(values: Sequence[float], columns: int) -> list[float]:
    """Returns `values` averaged into at most `columns` columns, ignoring non-finite values.

    A column without a finite value is NaN.
    """
    columns = min(columns, len(values))
    means = []
    for column in range(columns):
        start = column * len(values) // columns
        stop = (column + 1) * len(values) // columns
        finite = [value for value in values[start:stop] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """Returns one line of blocks by height; columns without finite values are blank."""
    points = resample(values, width)
    low, high = _range(points)
    levels = _ASCII_LEVELS if ascii_only else _BLOCKS
    top = len(levels) - 1
    return "".join(
        levels[round((point - low) / (high - low) * top)] if math.isfinite(point) else " "
        for point in points
    )


def plot(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    width: int = 60,
    height: int = 8,
    ascii_only: bool = False,
) -> list[str]:
    """Returns the lines of a plot of values [n], with gaps for non-finite ones, over increasing
    steps [n], with labels at the ends of both axes. `width` are characters of a line without the
    labels."""
    across, down = (1, 1) if ascii_only else (2, 4)
    points = resample(values, width * across)
    if not any(math.isfinite(point) for point in points):
        return ["(no finite values to draw)"]
    low, high = _range(points)
    rows = [
        round((high - point) / (high - low) * (height * down - 1)) if math.isfinite(point) else None
        for point in points
    ]
    drawing = _draw(rows, width, height, across, down)
    labels = [humanize.value(high), *[""] * (height - 2), humanize.value(low)][:height]
    margin = max(map(len, labels))
    side, corner, floor = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    lines = [f"{label:>{margin}} {side}{row}" for label, row in zip(labels, drawing, strict=True)]
    first, last = str(steps[0]), str(steps[-1])
    axis = first + last.rjust(width - len(first))
    return [*lines, f"{'':{margin}} {corner}{floor * width}", f"{'':{margin}}  {axis}"]


def _range(points: Sequence[float]) -> tuple[float, float]:
    finite = [point for point in points if math.isfinite(point)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    margin = max(0.5, abs(low) / 2)
    return (low, high) if high > low else (low - margin, low + margin)


def _draw(rows: Sequence[int | None], width: int, height: int, across: int, down: int) -> list[str]:
    cells = [[0] * width for _ in range(height)]
    # Fewer points than dots are spread over the whole width.
    dots = width * across
    before = None
    for column in range(dots):
        row = rows[column * len(rows) // dots]
        if row is not None:
            # Joined to the previous point, so that a steep curve stays connected.
            start, stop = sorted((row, row if before is None else before))
            joined = range(start, stop + 1) if across > 1 else (row,)
            for dot in joined:
                cells[dot // down][column // across] |= _BRAILLE[column % across][dot % down]
        before = row
    if across == 1:
        return ["".join("*" if cell else " " for cell in line) for line in cells]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]
