"""The report on a compiled step: memory, collectives, bounds and faults."""

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardlib import humanize
from shardlib.explain.analysis import timing
from shardlib.explain.analysis.collectives import Collective, ProgramReport, Total, read_program
from shardlib.explain.analysis.memory import MemoryReport, read_memory
from shardlib.explain.analysis.params import ParamsReport, explain_params
from shardlib.explain.analysis.roofline import Roofline, read_roofline, vocabularies_of
from shardlib.explain.analysis.timing import Flow
from shardlib.explain.aot.call import NO_KEYWORDS
from shardlib.explain.aot.capture_stderr import HIDDEN
from shardlib.explain.aot.compile import CompiledStep, compile_step
from shardlib.explain.aot.retarget import is_state
from shardlib.explain.hlo.text import parse
from shardlib.explain.lint import Finding, Limits, Subject, lint
from shardlib.explain.report.step_tables import (
    buffer_table,
    collective_table,
    memory_table,
    roofline_table,
)
from shardlib.explain.report.to_json import facts
from shardlib.hardware import Cluster, of_one_kind
from shardlib.tables import Table, captured

if TYPE_CHECKING:
    from shardlib.explain.report.diff import Diff


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The report on one step on a mesh. `str()` draws tables, `html()` returns a page with charts.

    Attributes:
        step: The compiled step.
        program: Collectives of the step.
        memory: Memory of one device at the peak.
        flows: Collectives with their times. Empty if the fabric is unknown.
        roofline: Time and use of each resource. None if the step was not traced to a jaxpr.
        findings: Faults of the step, without accepted ones.
        params: Report on the state. None if the step does not take one.
        fixes: Ways to make the step fit, as text, cheapest first. Empty if it fits.
        accepted: Faults that a baseline accepts.
    """

    step: CompiledStep
    program: ProgramReport
    memory: MemoryReport
    flows: tuple[Flow, ...]
    roofline: Roofline | None
    findings: tuple[Finding, ...]
    params: ParamsReport | None = None
    fixes: tuple[str, ...] = ()
    accepted: tuple[Finding, ...] = ()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of the program."""
        return self.program.collectives

    def totals(self, at_least_bytes: int = 0) -> list[Total]:
        """Returns the collectives by kind and axes, largest first. See `ProgramReport.totals`."""
        return self.program.totals(at_least_bytes)

    @property
    def fits(self) -> bool:
        """Whether the step fits in the memory of a device."""
        return self.memory.fits

    def title(self) -> str:
        """Returns a one-line title with the mesh and the cluster."""
        mesh = ",".join(f"{name}={size}" for name, size in self.step.mesh_sizes.items())
        where = self.step.cluster.name if self.step.cluster else "the devices at hand"
        return f"step on mesh {mesh or 'of one device'} of {where}"

    def verdict(self) -> str:
        """Returns one line that says whether the step fits."""
        memory, limit = self.memory, self.memory.capacity_bytes
        needed = humanize.size(memory.peak_bytes)
        if limit is None:
            return f"needs {needed} on each device"
        if not memory.fits:
            return f"does not fit: needs {needed}; a device has {humanize.size(limit)}"
        share = memory.peak_bytes / limit
        note = f" ({memory.note})" if memory.note else ""
        return f"fits: needs {needed} of {humanize.size(limit)} on each device, {share:.0%}{note}"

    @property
    def choices(self) -> Mapping[str, str]:
        """Choices and reasons of a run for settings that its config left open."""
        return self.params.choices if self.params is not None else {}

    def notes(self) -> list[str]:
        """Returns lines that complete the verdict: fixes, the cluster of the text if it is another
        one, hidden compiler warnings, and choices."""
        found, (cluster, text_of) = [*self.fixes], (self.step.cluster, self.step.compiled_for)
        if cluster is not None and text_of not in ("", cluster.name):
            found.append(f"too large to compile for it: everything but the peak is from {text_of}")
        if self.step.warnings is None:
            found.append(HIDDEN)
        return [*found, *(f"{name}: {text}" for name, text in self.choices.items())]

    def count(self) -> str:
        """Returns one line with the number of faults."""
        number, accepted = len(self.findings), len(self.accepted)
        faults = "fault" if number == 1 else "faults"
        if not accepted:
            return f"{number or 'no'} {faults} found"
        return f"{number or 'no'} new {faults}, {accepted} accepted"

    def tables(self) -> list[Table]:
        """Returns the tables of the report, except the table of parameters."""
        found = [memory_table(self.memory), buffer_table(self.memory)]
        found.append(collective_table(self.program, self.flows))
        return [*found, roofline_table(self.roofline)] if self.roofline else found

    def render(self) -> Any:
        """Returns the report as a rich renderable."""
        from rich.console import Group
        from rich.text import Text

        head = [Text(line) for line in (self.title(), self.verdict(), *self.notes())]
        tables = self.tables()
        return Group(*head, *tables, *map(Text, map(str, self.findings)), Text(self.count()))

    def __str__(self) -> str:
        return captured(self.render())

    def html(self) -> str:
        """Returns the report as one HTML page that works offline."""
        from shardlib.explain.report.html_page import page

        return page(self)

    def diff(self, after: "StepReport") -> "Diff":
        """Returns the difference from this step to another one."""
        from shardlib.explain.report.diff import diff

        return diff(self, after)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, with the same keys on every platform.

        Numbers that are unknown or not finite are None. `cluster` is None for the devices at hand.
        `roofline` and `params` are None if the report lacks them.

        - `cluster`, `compiled_for` (the cluster of the text, another one if the step is far too
          large), `mesh` (axis sizes), `fits`.
        - `peak_bytes`, `capacity_bytes`, `live_bytes` (the peak by live ranges, without code),
          `peak_at`, `memory_bytes` (by category), `timeline` (pairs of operation and bytes),
          `largest_buffers` (`bytes` of each of `count` equal ones, `shape`, `category`, `opcode`,
          `op_name`, `source`).
        - `collectives`, largest traffic first: the attributes of `Collective`, `sent_bytes` of one
          device in a step, and the attributes of `Flow`: `seconds` by fabric, `overlap`,
          `overlappable`, `note`. `unattributed_bytes` are sent over groups that follow no mesh
          axes. `unread` counts communication without groups by opcode, and `unread_bytes` are the
          bytes that it sends.
        - `roofline`: the attributes of `Roofline`, its `memory_bytes`, `intensity`, `redundancy`,
          `seconds` by resource and `binding`. `flops` also has the totals. Each of `stages` also
          has `intensity` and `binding`.
        - `findings` and `accepted`: the attributes of `Finding`, and `title`.
        - `fixes`, `choices` (reasons by choice), `params` (see `ParamsReport`).
        """
        return facts(self)

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def explain_step(
    step: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] = NO_KEYWORDS,
    *,
    on: str | Cluster | None = None,
    optimize: bool = False,
    limits: Limits | None = None,
) -> StepReport:
    """Compiles a step, for a cluster that need not be attached, and returns the report on it.

    See `shardlib.explain.explain` and `shardlib.explain.aot.compile.compile_step`.
    """
    cluster = None if on is None else of_one_kind(on)
    states = [value for value in (*arguments, *keywords.values()) if is_state(value)]
    params = explain_params(states[0]) if states else None
    compiled = compile_step(step, arguments, keywords, on=cluster, optimize=optimize)
    report = report_on(compiled, params, limits)
    return report if report.fits else dataclasses.replace(report, fixes=(_advice(report.memory),))


def report_on(
    step: CompiledStep, params: ParamsReport | None = None, limits: Limits | None = None
) -> StepReport:
    """Returns the report on a compiled step."""
    module, cluster = parse(step.text), step.cluster
    program = read_program(module, step.mesh)
    flows = None
    if cluster is not None and cluster.chip is not None:
        flows = timing.collective_times(program, cluster, module)
    roofline = None
    if step.jaxpr is not None:
        words = vocabularies_of(params) if params is not None else {}
        roofline = read_roofline(
            step.jaxpr, module, step.mesh_sizes, cluster, flows, vocabularies=words
        )
    given = () if limits is None else (limits,)
    subject = Subject.of(step, params, *given, module=module, program=program)
    memory = read_memory(step, module)
    return StepReport(step, program, memory, flows or (), roofline, lint(subject), params)


def _advice(memory: MemoryReport) -> str:
    """Returns advice for a step that does not fit, by the largest category of its memory."""
    largest = max(memory.categories, key=lambda name: memory.categories[name])
    held = humanize.size(memory.categories[largest])
    what = f"most of it is {largest.replace('_', ' ')} ({held})"
    if largest in ("params", "optimizer", "gradients"):
        return f"{what}: shard them over more mesh axes, or take a larger cluster"
    if largest in ("activations", "temporaries"):
        return f"{what}: recompute layers (jax.checkpoint), or split the batch into microbatches"
    return f"{what}: shard it over more mesh axes, or take a larger cluster"
