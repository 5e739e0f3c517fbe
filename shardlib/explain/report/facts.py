"""The facts of a report on a compiled step: memory, collectives, bounds and faults."""

import dataclasses
from collections.abc import Mapping

from shardlib import humanize
from shardlib.explain.analysis.collectives import Collective, ProgramReport, Total
from shardlib.explain.analysis.memory import MemoryReport
from shardlib.explain.analysis.params import ParamsReport
from shardlib.explain.analysis.roofline import Roofline
from shardlib.explain.analysis.timing import Flow
from shardlib.explain.aot.capture_stderr import HIDDEN
from shardlib.explain.aot.compile import CompiledStep
from shardlib.explain.lint import Finding
from shardlib.hardware.compiler_options import described


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """The facts of a report on one step on a mesh. See `StepReport` for the attributes."""

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
        needed = f"a device needs {humanize.size(memory.peak_bytes)}"
        if limit is None:
            return needed
        both = f"{needed} and has {humanize.size(limit)}"
        if not memory.fits:
            return f"does not fit: {both}"
        note = f" ({memory.note})" if memory.note else ""
        return f"fits: {both}, {memory.peak_bytes / limit:.0%} are in use{note}"

    @property
    def choices(self) -> Mapping[str, str]:
        """Choices and reasons of a run for settings that its config left open."""
        return self.params.choices if self.params is not None else {}

    def notes(self) -> list[str]:
        """Returns lines that complete the verdict: fixes, the cluster of the text if it is another
        one, hidden compiler warnings, compiler options, and choices."""
        lines, (cluster, text_of) = [*self.fixes], (self.step.cluster, self.step.compiled_for)
        if cluster is not None and text_of not in ("", cluster.name):
            lines.append(f"too large to compile for it: everything but the peak is from {text_of}")
        if self.step.warnings is None:
            lines.append(HIDDEN)
        lines += [f"compiler option {option}" for option in described(self.step.options)]
        return [*lines, *(self.params.choice_lines() if self.params is not None else ())]

    def count(self) -> str:
        """Returns one line with the number of faults."""
        number, accepted = len(self.findings), len(self.accepted)
        faults = "fault" if number == 1 else "faults"
        if not accepted:
            return f"{number or 'no'} {faults} found"
        return f"{number or 'no'} new {faults}, {accepted} accepted"
