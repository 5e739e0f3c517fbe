"""What a compiled step does, all together: memory, collectives, bounds and faults."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from shardlib.explain import timing
from shardlib.explain.ahead import CompiledStep, compile_step
from shardlib.explain.hlo import parse
from shardlib.explain.lint import Finding, Limits, Subject, lint
from shardlib.explain.memory import MemoryReport, read_memory
from shardlib.explain.moving import is_state
from shardlib.explain.params import ParamsReport, bytes_text, explain_params
from shardlib.explain.program import (
    Collective,
    ProgramReport,
    Total,
    axes_text,
    read_program,
)
from shardlib.explain.roofline import CONVENTIONS, Roofline, read_roofline
from shardlib.explain.slices import slices_of
from shardlib.explain.tables import Table
from shardlib.explain.timing import Flow
from shardlib.hardware import Cluster, parse_cluster

if TYPE_CHECKING:
    from shardlib.explain.diff import Diff


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one step does on a mesh. `str()` draws its tables; `html()` is a page with drawings.

    Attributes:
        step: The compiled step.
        program: Its collectives.
        memory: What one device holds at the peak.
        flows: Its collectives with their times; empty where the fabric is not known.
        roofline: What it takes of each resource; None where the step was not traced to a jaxpr.
        findings: Its faults, without accepted ones.
        params: The report on the state, where the step takes one.
        fixes: What would make it fit where it does not, cheapest first, as text.
    """

    step: CompiledStep
    program: ProgramReport
    memory: MemoryReport
    flows: tuple[Flow, ...]
    roofline: Roofline | None
    findings: tuple[Finding, ...]
    params: ParamsReport | None = None
    fixes: tuple[str, ...] = ()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the program."""
        return self.program.collectives

    def totals(self, at_least_bytes: int = 0) -> list[Total]:
        """Returns the collectives by kind and axes, largest first; see `ProgramReport.totals`."""
        return self.program.totals(at_least_bytes)

    @property
    def fits(self) -> bool:
        """Whether the step fits a device."""
        return self.memory.fits

    def title(self) -> str:
        """Returns what the report is of, in a line."""
        mesh = ",".join(f"{name}={size}" for name, size in self.step.mesh_sizes.items())
        where = self.step.cluster.name if self.step.cluster else "the devices at hand"
        return f"step on mesh {mesh or 'of one device'} of {where}"

    def verdict(self) -> str:
        """Returns whether the step fits, in a line."""
        memory, limit = self.memory, self.memory.capacity_bytes
        needed = bytes_text(memory.peak_bytes)
        if limit is None:
            return f"needs {needed} on each device"
        if not memory.fits:
            return f"does not fit: needs {needed} of {bytes_text(limit)}"
        share = memory.peak_bytes / limit
        note = f" ({memory.note})" if memory.note else ""
        return f"fits: needs {needed} of {bytes_text(limit)} on each device, {share:.0%}{note}"

    def _stand_in(self) -> list[str]:
        """What to know where the text is not that of the cluster itself."""
        cluster, text_of = self.step.cluster, self.step.compiled_for
        if cluster is None or text_of in ("", cluster.name):
            return []
        return [f"too large to be compiled for it: all but the peak is of {text_of}"]

    def tables(self) -> list[Table]:
        """Returns the report as tables, but for the parameters."""
        found = [_memory_table(self.memory), _buffer_table(self.memory), self._collective_table()]
        return [*found, _roofline_table(self.roofline)] if self.roofline else found

    def _collective_table(self) -> Table:
        notes = [
            f"follows no mesh axes: {c.kind} {' '.join(c.shapes)} x {c.count} {c.source}".rstrip()
            for c in self.program.unattributed()
        ]
        notes += [f"not read: {count} {name}" for name, count in self.program.unread.items()]
        if not all(collective.trips_known for collective in self.program.collectives):
            notes.append("some loops have unknown trip counts and count once")
        if self.flows:
            rows = timing.rows(self.flows)
            notes += dict.fromkeys(note for row in rows for note in row.notes)
            return Table("collectives of a step", _TIMED, [_timed(row) for row in rows], notes)
        rows = [
            (t.kind, axes_text(t.mesh_axes), str(t.count), bytes_text(t.bytes))
            for t in self.program.totals()
        ]
        return Table(
            "collectives of a step", ("kind", "mesh axes", "count>", "bytes>"), rows, notes
        )

    def render(self) -> Any:
        """Returns the report as something that rich prints."""
        from rich.console import Group
        from rich.text import Text

        choices = self.params.choices if self.params is not None else {}
        lines = [self.title(), self.verdict(), *self.fixes, *self._stand_in()]
        lines += [f"{name}: {text}" for name, text in choices.items()]
        parts: list[Any] = [Text(line) for line in lines]
        parts += [table.render() for table in self.tables()]
        parts += [Text(str(finding)) for finding in self.findings]
        count = len(self.findings)
        parts.append(Text(f"{count or 'no'} fault{'s' * (count != 1)} found"))
        return Group(*parts)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160, no_color=True, highlight=False)
        with console.capture() as capture:
            console.print(self.render())
        return capture.get()

    def html(self) -> str:
        """Returns the report as one HTML page, which needs no network."""
        from shardlib.explain.html import page

        return page(self)

    def diff(self, after: "StepReport") -> "Diff":
        """Returns what changes from this step to another."""
        from shardlib.explain.diff import diff

        return diff(self, after)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON."""
        return {
            "cluster": self.step.cluster.name if self.step.cluster else None,
            "mesh": dict(self.step.mesh_sizes),
            "fits": self.fits,
            "peak_bytes": self.memory.peak_bytes,
            "capacity_bytes": self.memory.capacity_bytes,
            "memory_bytes": dict(self.memory.categories),
            "largest_buffers": [dataclasses.asdict(buffer) for buffer in self.memory.largest],
            "collectives": [_plain(flow) for flow in self.flows]
            or [dataclasses.asdict(c) for c in self.program.collectives],
            "roofline": _plain(self.roofline) if self.roofline else None,
            "findings": [finding.to_dict() for finding in self.findings],
            "fixes": list(self.fixes),
            "params": self.params.to_dict() if self.params else None,
        }

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps(self.to_dict(), indent=2)


def explain_step(
    step: Any,
    arguments: tuple[Any, ...],
    *,
    on: str | Cluster | None = None,
    optimize: bool = False,
    limits: Limits | None = None,
) -> StepReport:
    """Compiles a step, for a cluster that need not be there, and reports on it; see
    `shardlib.explain.explain` and `shardlib.explain.ahead.compile_step`."""
    cluster = parse_cluster(on) if isinstance(on, str) else on
    states = [argument for argument in arguments if is_state(argument)]
    params = explain_params(states[0]) if states else None
    return report_on(compile_step(step, arguments, on=cluster, optimize=optimize), params, limits)


def report_on(
    step: CompiledStep, params: ParamsReport | None = None, limits: Limits | None = None
) -> StepReport:
    """Returns the report on a step that is compiled."""
    module, cluster = parse(step.text), step.cluster
    program = read_program(step.text, step.mesh)
    flows: tuple[Flow, ...] = ()
    if cluster is not None and cluster.chip is not None:
        slices = slices_of(step.mesh, step.mesh_sizes, module)
        outer = slices.outer if slices.count > 1 else None
        flows = timing.collective_times(program, cluster, module, outer=outer)
    roofline = None
    if step.jaxpr is not None:
        roofline = read_roofline(
            step.jaxpr,
            module,
            step.mesh_sizes,
            cluster,
            flows,
            vocabularies=_vocabularies(params),
        )
    subject = Subject.of(step, params, *(() if limits is None else (limits,)))
    return StepReport(step, program, read_memory(step), flows, roofline, lint(subject), params)


def _vocabularies(params: ParamsReport | None) -> set[int]:
    """Sizes of dims that a parameter calls `vocab`."""
    rows = params.rows if params is not None else ()
    return {
        size
        for row in rows
        for name, size in zip(row.logical_axes or (), row.shape, strict=False)
        if name == "vocab"
    }


_TIMED = (
    *("kind", "mesh axes", "over", "count>", "sent by a device>", "seconds>"),
    *("hidden by computation>", "where it is from"),
)


def _timed(row: timing.Row) -> tuple[str, ...]:
    seconds = "?" if row.unknown and not row.seconds else f"{row.seconds:.3g}"
    hidden = f"{row.overlappable_seconds:.3g}" if row.overlappable_seconds else "-"
    if "could overlap" in row.overlaps:
        hidden = "could be"
    more = f" and {len(row.sources) - 2} more" if len(row.sources) > 2 else ""
    return (
        row.kind,
        axes_text(row.mesh_axes),
        row.fabric,
        str(row.count),
        bytes_text(row.sent_bytes),
        seconds,
        hidden,
        "\n".join(map(_short, row.sources[:2])) + more,
    )


def _memory_table(memory: MemoryReport) -> Table:
    peak = max(memory.peak_bytes, 1)
    rows = [
        (name.replace("_", " "), bytes_text(size), f"{size / peak:.0%}")
        for name, size in memory.categories.items()
        if size
    ]
    notes = [f"the peak is at {memory.at}"] if memory.at else []
    return Table("memory of one device at the peak", ("what", "bytes>", "share>"), rows, notes)


def _buffer_table(memory: MemoryReport) -> Table:
    rows = [
        (bytes_text(b.bytes), b.shape.partition("{")[0], b.category, b.op_name, _short(b.source))
        for b in memory.largest
    ]
    columns = ("bytes>", "array", "what", "operation or argument", "source")
    return Table("largest buffers at the peak", columns, rows)


def _roofline_table(roofline: Roofline) -> Table:
    columns = (
        *("part", "FLOPs of a device>", "memory moved>", "FLOPs a byte>"),
        *("compute s>", "memory s>", "network s>", "bound by"),
    )
    rows = [
        (
            stage.stage,
            f"{stage.flops:.3g}",
            bytes_text(stage.memory_bytes),
            f"{stage.intensity:.0f}",
            *(_seconds(s) for s in (stage.compute_seconds, stage.memory_seconds)),
            _seconds(stage.network_seconds),
            stage.binding,
        )
        for stage in roofline.stages
    ]
    flops = roofline.flops
    notes = [
        f"model FLOPs {flops.total_model:.4g}, hardware FLOPs {flops.total_hardware:.4g}, compiled "
        f"{roofline.redundancy:.2f} of the hardware FLOPs; bound by {roofline.binding}",
        *(f"{name}: {meaning}" for name, meaning in CONVENTIONS.items()),
        *roofline.notes,
    ]
    return Table("what bounds each part of the step", columns, rows, notes)


def _seconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.3g}"


def _short(source: str) -> str:
    """`file:line` with the last two parts of the path."""
    return "/".join(source.rsplit("/", 2)[-2:])


def _plain(value: Any) -> Any:
    """Dataclasses and containers as plain data; a number that is none as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
