"""The report on a compiled step: its facts, with methods that render them."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardlib import humanize
from shardlib.explain.analysis import timing
from shardlib.explain.analysis.collectives import read_program
from shardlib.explain.analysis.memory import MemoryReport, read_memory
from shardlib.explain.analysis.params import ParamsReport, explain_params
from shardlib.explain.analysis.roofline import read_roofline, vocabularies_of
from shardlib.explain.aot.call import NO_KEYWORDS, Step
from shardlib.explain.aot.compile import CompiledStep, compile_step
from shardlib.explain.aot.retarget import is_state
from shardlib.explain.hlo.text import parse
from shardlib.explain.lint import Limits, Subject, lint
from shardlib.explain.report import diff as diffs
from shardlib.explain.report import html_page, text, to_json
from shardlib.explain.report.facts import StepFacts
from shardlib.hardware import Cluster, of_one_kind
from shardlib.tables import Report, Table


@dataclasses.dataclass(frozen=True)
class StepReport(StepFacts, Report):
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

    def tables(self) -> list[Table]:
        """Returns the tables of the report, except the table of parameters."""
        return text.tables(self)

    def parts(self) -> Iterator[Table | str]:
        return text.parts(self)

    def html(self) -> str:
        """Returns the report as one HTML page that works offline."""
        return html_page.page(self)

    def diff(self, after: StepFacts) -> diffs.Diff:
        """Returns the difference from this step to another one."""
        return diffs.diff(self, after)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON, with the same keys on every platform.

        Numbers that are unknown or not finite are None. `cluster` is None for the devices at hand.
        `roofline` and `params` are None if the report lacks them.

        - `cluster`, `compiled_for` (the cluster of the text, another one if the step is far too
          large), `mesh` (axis sizes), `fits`, `compiler_options` (values by name), `scheduled`
          (whether the program is optimized as for a run).
        - `peak_bytes`, `capacity_bytes`, `live_bytes` (the peak by live ranges, without code),
          `peak_at`, `memory_bytes` (by category), `timeline` (pairs of operation and bytes),
          `largest_buffers` (`bytes` of each of `count` equal ones, `shape`, `category`, `opcode`,
          `op_name`, `source`, `model_path`, `phase`).
        - `collectives`, largest traffic first: the attributes of `Collective`, `sent_bytes` of one
          device in a step, and the attributes of `Flow`: `seconds` by fabric, `overlap`,
          `overlappable`, `note`, and `hidden_seconds`. `unattributed_bytes` are sent over groups
          that follow no mesh axes. `unread` counts communication without groups by opcode, and
          `unread_bytes` are the bytes that it sends.
        - `roofline`: the attributes of `Roofline`, its `memory_bytes`, `intensity`, `redundancy`,
          `seconds` by resource, `step_seconds` and `binding`. `flops` also has the totals. Each of
          `stages` also has `intensity` and `binding`.
        - `findings` and `accepted`: the attributes of `Finding`, and `title`.
        - `fixes`, `choices` (reasons by choice), `params` (see `ParamsReport`).
        """
        return to_json.facts(self)

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


def explain_step(
    step: Step,
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
        flows = timing.collective_times(program, cluster, module, scheduled=step.scheduled)
    roofline = None
    if step.jaxpr is not None:
        words = vocabularies_of(params) if params is not None else {}
        roofline = read_roofline(
            step.jaxpr, module, step.mesh_sizes, cluster, flows, vocabularies=words
        )
    subject = Subject.of(step, params, limits or Limits(), module=module, program=program)
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
