"""A report on a compiled step as lines and tables."""

from collections.abc import Iterator

from shardlib import humanize
from shardlib.explain.analysis import timing
from shardlib.explain.analysis.collectives import ProgramReport, axes_text
from shardlib.explain.analysis.memory import HeldBuffer, MemoryReport
from shardlib.explain.analysis.roofline import CONVENTIONS, Roofline, StageCost
from shardlib.explain.analysis.timing import Flow
from shardlib.explain.hlo.provenance import operation_of
from shardlib.explain.report.facts import StepFacts
from shardlib.tables import Table

_WHERE = ("part of the model", "pass", "operation or argument")
_SENT = ("kind", "mesh axes", "count>", "sent by a device>", "where it is from")
_TIMED = (*_SENT[:2], "over", *_SENT[2:4], "time>", "hidden>", _SENT[4])


def parts(report: StepFacts) -> Iterator[Table | str]:
    """Yields the lines and tables of a report, except the table of parameters."""
    yield from (report.title(), report.verdict(), *report.notes())
    yield from tables(report)
    yield from map(str, report.findings)
    yield report.count()


def tables(report: StepFacts) -> list[Table]:
    """Returns the tables of a report, except the table of parameters."""
    drawn = [memory_table(report.memory), buffer_table(report.memory)]
    drawn.append(collective_table(report.program, report.flows))
    return [*drawn, roofline_table(report.roofline)] if report.roofline else drawn


def memory_table(memory: MemoryReport) -> Table:
    """Returns the table of a device's memory at the peak, by category."""
    peak = max(memory.peak_bytes, 1)
    rows = [
        (name.replace("_", " "), humanize.size(size), f"{size / peak:.0%}")
        for name, size in memory.categories.items()
        if size
    ]
    notes = [f"the peak is at {memory.at}"] if memory.at else []
    if memory.surplus_bytes:
        more = "more" if memory.surplus_bytes > 0 else "less"
        surplus = humanize.size(abs(memory.surplus_bytes))
        notes.append(f"the compiler's own peak is {surplus} {more} than the known buffers hold")
    return Table("memory of one device at the peak", ("what", "bytes>", "share>"), rows, notes)


def buffer_table(memory: MemoryReport) -> Table:
    """Returns the table of the largest buffers at the peak."""
    columns = ("bytes>", "array", "what", *_WHERE, "source")
    return Table("largest buffers at the peak", columns, [_buffer(b) for b in memory.largest])


def _buffer(held: HeldBuffer) -> tuple[str, ...]:
    size = humanize.size(held.bytes)
    size = size if held.count == 1 else f"{held.count} x {size}"
    array, operation = held.shape.partition("{")[0], operation_of(held.op_name) or held.opcode
    where = (held.model_path, held.phase, operation, short(held.source))
    return size, array, held.category.replace("_", " "), *where


def collective_table(program: ProgramReport, flows: tuple[Flow, ...]) -> Table:
    """Returns the table of collectives by kind and mesh axes, with times if `flows` is given."""
    rows = timing.rows(flows or timing.untimed(program))
    notes = [*program.unknowns(), *dict.fromkeys(note for row in rows for note in row.notes)]
    if any("unscheduled" in row.overlaps for row in rows):
        notes.append("what is hidden is read from a program that is compiled with --optimize")
    cells = [_timed(row) if flows else _sent(row) for row in rows]
    return Table("collectives of a step", _TIMED if flows else _SENT, cells, notes)


def _sent(row: timing.CollectiveRow) -> tuple[str, ...]:
    sent = humanize.size(row.sent_bytes)
    return row.kind, axes_text(row.mesh_axes), str(row.count), sent, _places(row)


def _timed(row: timing.CollectiveRow) -> tuple[str, ...]:
    kind, axes, count, sent, places = _sent(row)
    seconds = "?" if row.unknown and not row.seconds else humanize.duration(row.seconds)
    hidden = f"{humanize.duration(row.hidden_seconds)} of {seconds}"
    if "unscheduled" in row.overlaps:
        hidden = "not scheduled"
    return kind, axes, row.fabric, count, sent, seconds, hidden, places


def _places(row: timing.CollectiveRow) -> str:
    lines = [
        " ".join(filter(None, (path, f"({phase})" if phase else "", short(source))))
        for source, path, phase in row.sources[:2]
    ]
    if len(row.sources) > len(lines):
        lines.append(f"and {len(row.sources) - len(lines)} more")
    return "\n".join(lines)


def roofline_table(roofline: Roofline) -> Table:
    """Returns the table of the resources that each part of a step uses."""
    columns = (
        *("part", "FLOPs of a device>", "memory moved>", "FLOPs a byte>"),
        *("compute>", "memory>", "network>", "bound by"),
    )
    flops = roofline.flops
    notes = [
        f"model FLOPs {humanize.flops(flops.total_model)}, hardware FLOPs "
        f"{humanize.flops(flops.total_hardware)}, compiled {roofline.redundancy:.2f} times the "
        f"hardware FLOPs; bound by {roofline.binding}",
        *_step_seconds(roofline),
        *(f"{name}: {meaning}" for name, meaning in CONVENTIONS.items()),
        *roofline.notes,
    ]
    rows = [_stage(stage) for stage in roofline.stages]
    return Table("what bounds each part of the step", columns, rows, notes)


def _step_seconds(roofline: Roofline) -> Iterator[str]:
    busy, exposed, step = roofline.busy_seconds, roofline.exposed_seconds, roofline.step_seconds
    if busy is not None and exposed is not None and step is not None:
        yield (
            f"the step takes at least {humanize.duration(step)}: {humanize.duration(busy)} of "
            f"compute or memory traffic, and {humanize.duration(exposed)} of collectives that "
            "nothing hides"
        )


def _stage(stage: StageCost) -> tuple[str, ...]:
    return (
        stage.stage,
        humanize.flops(stage.flops),
        humanize.size(stage.memory_bytes),
        f"{stage.intensity:.0f}",
        *(_seconds(s) for s in (stage.compute_seconds, stage.memory_seconds)),
        _seconds(stage.network_seconds),
        stage.binding,
    )


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else humanize.duration(seconds)


def short(source: str) -> str:
    """Returns `file:line` with the last two parts of the path."""
    return "/".join(source.rsplit("/", 2)[-2:])
