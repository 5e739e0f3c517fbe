"""The HTML page of a report: the tables of the terminal, with charts."""

import html
from collections.abc import Iterable

from shardlib.explain.analysis.matrix import communication_matrix
from shardlib.explain.report import html_charts as charts
from shardlib.explain.report.facts import StepFacts
from shardlib.explain.report.text import tables

_COLOURS = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2"),
    *("#b279a2", "#eeca3b", "#9d755d", "#8a939e"),
)
_STYLE = """
:root { --ink: #1c2127; --paper: #fff; --line: #d8dee6; --faint: #5b6673; --heat: #b3261e;
  --good: #1b7f3b; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf0; --paper: #14181d; --line: #333c47;
  --faint: #9aa7b5; --heat: #ff8a80; --good: #6fd08c; --bad: #ff8a80 } }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1080px; margin: 24px auto; padding: 0 16px }
h1 { font-size: 22px } h2 { font-size: 16px; margin-top: 32px }
table { border-collapse: collapse }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: pre-line }
th { color: var(--faint); font-weight: 600 } .left { text-align: left }
.right { text-align: right; font-variant-numeric: tabular-nums } .scroll { overflow-x: auto }
svg { max-width: 100%; height: auto; overflow: visible }
svg text { fill: var(--faint); font-size: 11px }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px }
.limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 5 3 } .peak { fill: var(--bad) }
.area { fill: #4c78a8; fill-opacity: .55; stroke: #4c78a8 } .heat { fill: var(--heat) }
.frame { fill: none; stroke: var(--line) }
.piece { fill: #4c78a8; fill-opacity: .25; stroke: #4c78a8 }
.cut { stroke: #4c78a8; stroke-width: 1.5 } .fits { color: var(--good) }
.fault { color: var(--bad) }
.pieces { display: flex; flex-wrap: wrap; gap: 18px } .pieces figure { margin: 0; width: 170px }
figcaption { overflow-wrap: anywhere } small { color: var(--faint); display: block }
""" + "\n".join(
    f".c{index} {{ fill: {colour}; background: {colour} }}" for index, colour in enumerate(_COLOURS)
)


def page(report: StepFacts) -> str:
    """Returns a report on a step as one HTML page that works offline."""
    fits = "fits" if report.fits else "fault"
    parts = [
        f"<h1>{html.escape(report.title())}</h1>",
        f'<p class="{fits}"><strong>{html.escape(report.verdict())}</strong></p>',
        *(f"<p>{html.escape(line)}</p>" for line in report.notes()),
        _findings(report),
        _memory(report),
        *(table.html() for table in tables(report)),
        _matrix(report),
        _pieces(report),
    ]
    return document(report.title(), parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Returns one HTML page that works offline, from the HTML of its parts."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _findings(report: StepFacts) -> str:
    title = f"<h2>{html.escape(report.count().capitalize())}</h2>"
    items = "".join(
        f"<li class=\"fault\" style='white-space: pre-wrap'>{html.escape(str(finding))}</li>"
        for finding in report.findings
    )
    return f"{title}<ul>{items}</ul>" if items else title


def _memory(report: StepFacts) -> str:
    memory = report.memory
    limit = memory.capacity_bytes
    bar = charts.stacked_bar(list(memory.categories.items()), limit, "chip capacity")
    line = charts.timeline(memory.timeline, limit, memory.peak_bytes)
    return f"<h2>Memory of one device at the peak</h2>{bar}<h2>Memory over the step</h2>{line}"


def _matrix(report: StepFacts) -> str:
    matrix = communication_matrix(report.program)
    size = matrix.devices_per_block
    count = len(matrix.sent)
    names = [str(i) if size == 1 else f"{i * size}-{(i + 1) * size - 1}" for i in range(count)]
    senders = "devices" if size == 1 else f"blocks of {size} devices"
    note = ""
    if matrix.unplaced_bytes:
        note = f"<p>Not drawn: {matrix.unplaced_bytes:,.0f} bytes that follow no mesh axes.</p>"
    return (
        f"<h2>Bytes that {senders} send each other in a step</h2>"
        f"{charts.heatmap(matrix.sent, names)}{note}"
    )


def _pieces(report: StepFacts) -> str:
    """Returns drawings of the largest parameters with their shards."""
    if report.params is None:
        return ""
    rows = [row for row in report.params.rows if row.section == "params"]
    rows = sorted(rows, key=lambda row: -row.bytes_total)[:12]
    figures = "".join(
        f"<figure>{charts.pieces(row.shape, row.cuts(report.params.mesh), row.copies)}"
        f"<figcaption><code>{html.escape(row.path)}</code> "
        f"{html.escape('x'.join(map(str, row.shape)))}</figcaption></figure>"
        for row in rows
    )
    return f"<h2>The largest parameters and their shards</h2><div class='pieces'>{figures}</div>"
