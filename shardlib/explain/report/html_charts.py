"""Charts of a report as SVG text without scripts or external resources."""

import html
import math
from collections.abc import Sequence

import numpy as np

from shardlib import humanize

_WIDTH = 860


def stacked_bar(parts: Sequence[tuple[str, float]], limit: float | None, limit_name: str) -> str:
    """Draws parts of a whole side by side, with a mark at the limit. Parts are in bytes, and empty
    ones are left out; `limit` is marked with its name."""
    parts = [(name, size) for name, size in parts if size > 0]
    total = sum(size for _, size in parts)
    limit = _near(limit, total)
    scale = (_WIDTH - 20) / max(total, limit or 0.0, 1.0)
    boxes, legend, x = [], [], 0.0
    for index, (name, size) in enumerate(parts):
        title = f"{name}: {humanize.size(size)}"
        boxes.append(
            f'<rect x="{x:.1f}" y="0" width="{size * scale:.1f}" height="36" '
            f'class="c{index % 9}"><title>{html.escape(title)}</title></rect>'
        )
        legend.append(f'<li><i class="c{index % 9}"></i>{html.escape(title)}</li>')
        x += size * scale
    if limit:
        at = limit * scale
        anchor = "end" if at > _WIDTH / 2 else "start"
        boxes.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="-2" y2="44" class="limit"/>'
            f'<text x="{at:.1f}" y="58" text-anchor="{anchor}">{html.escape(limit_name)}</text>'
        )
    return f'{_svg(_WIDTH, 66, "".join(boxes))}<ul class="legend">{"".join(legend)}</ul>'


def timeline(points: Sequence[tuple[str, float]], limit: float | None, whole: float) -> str:
    """Draws the bytes of live buffers over the run of a program: operations with their live bytes
    in order of execution. `whole` is what the program needs at its peak, with code and all other
    memory."""
    height = 180
    if not points:
        return "<p>The schedule of this program is unknown.</p>"
    sizes = np.array([size for _, size in points], dtype=float)
    limit = _near(limit, float(sizes.max()))
    top = max(float(sizes.max()), limit or 0.0, 1.0) * 1.05
    xs = np.linspace(0, _WIDTH, len(points) + 1)
    path = [f"M0 {height}"]
    for index, size in enumerate(sizes):
        y = height * (1 - size / top)
        path.append(f"L{xs[index]:.1f} {y:.1f} L{xs[index + 1]:.1f} {y:.1f}")
    path.append(f"L{_WIDTH} {height} Z")
    peak = int(sizes.argmax())
    marks = [
        f'<path d="{" ".join(path)}" class="area"/>',
        f'<circle cx="{xs[peak]:.1f}" cy="{height * (1 - sizes[peak] / top):.1f}" r="4" '
        f'class="peak"><title>{html.escape(points[peak][0])}</title></circle>',
    ]
    if limit:
        y = height * (1 - limit / top)
        marks.append(f'<line x1="0" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="limit"/>')
    label = (
        f"buffers take {humanize.size(sizes[peak])} at most, at {html.escape(points[peak][0])}; "
        f"with code and memory that only the compiler knows, the step needs {humanize.size(whole)}"
    )
    return f"{_svg(_WIDTH, height, ''.join(marks))}<p>{label}</p>"


def heatmap(cells: np.ndarray, names: Sequence[str]) -> str:
    """Draws a matrix of the bytes that senders (rows) send to receivers (columns)."""
    count = len(names)
    side = min(26.0, 620 / max(count, 1))
    most = float(cells.max()) if cells.size else 0.0
    marks = []
    for row, column in zip(*np.nonzero(cells), strict=True):
        size = float(cells[row, column])
        # The faintest cell stays distinct from an empty one.
        shade = 0.12 + 0.88 * size / most
        title = f"{names[row]} to {names[column]}: {humanize.size(size)}"
        marks.append(
            f'<rect x="{60 + column * side:.1f}" y="{20 + row * side:.1f}" width="{side:.1f}" '
            f'height="{side:.1f}" class="heat" fill-opacity="{shade:.2f}">'
            f"<title>{html.escape(title)}</title></rect>"
        )
    every = max(1, count // 16)
    for index in range(0, count, every):
        at = 20 + (index + 0.5) * side + 4
        name = html.escape(names[index])
        marks.append(f'<text x="54" y="{at:.1f}" text-anchor="end">{name}</text>')
        marks.append(f'<text x="{at + 36:.1f}" y="14" text-anchor="middle">{name}</text>')
    edge = count * side
    marks.append(
        f'<rect x="60" y="20" width="{edge:.1f}" height="{edge:.1f}" class="frame"></rect>'
    )
    return _svg(70 + edge, 30 + edge, "".join(marks))


def pieces(shape: Sequence[int], cuts: Sequence[int], copies: int) -> str:
    """Draws one array as a rectangle with its shards. `cuts` are the shards of each dim; `copies`
    devices hold each shard."""
    finest = sorted(range(len(shape)), key=lambda dim: (-cuts[dim], dim))[:2]
    rows, columns = 1, 1
    if len(finest) == 1:
        columns = cuts[finest[0]]
    elif finest:
        first, second = sorted(finest)
        rows, columns = cuts[first], cuts[second]
    width, height = 150.0, 84.0
    lines = [f'<rect x="1" y="1" width="{width}" height="{height}" class="piece"/>']
    shown_rows, shown_columns = min(rows, 32), min(columns, 32)
    for index in range(1, shown_rows):
        y = 1 + height * index / shown_rows
        lines.append(f'<line x1="1" x2="{width + 1}" y1="{y:.1f}" y2="{y:.1f}" class="cut"/>')
    for index in range(1, shown_columns):
        x = 1 + width * index / shown_columns
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="1" y2="{height + 1}" class="cut"/>')
    whole = math.prod(cuts)
    label = f"{whole} piece{'s' * (whole > 1)}, {copies} cop{'ies' if copies > 1 else 'y'} of each"
    return f"{_svg(width + 2, height + 2, ''.join(lines))}<small>{label}</small>"


def _near(limit: float | None, size: float) -> float | None:
    """Returns the limit, or None if drawing it would make everything else too small."""
    return limit if limit and limit < 8 * size else None


def _svg(width: float, height: float, content: str) -> str:
    return (
        f'<svg viewBox="0 -4 {width:.0f} {height + 6:.0f}" width="{width:.0f}" role="img">'
        f"{content}</svg>"
    )
