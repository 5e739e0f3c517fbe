"""The difference between two reports on steps."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from shardlib import humanize
from shardlib.explain.analysis.collectives import axes_text
from shardlib.explain.analysis.params import spec_text
from shardlib.explain.report.facts import StepFacts
from shardlib.tables import Report, Table


@dataclasses.dataclass(frozen=True)
class FigureChange:
    """One figure before and after. None if a step lacks it."""

    what: str
    before: float | None
    after: float | None
    unit: str
    """`bytes`, `s`, or empty."""

    @property
    def ratio(self) -> float | None:
        """The ratio of after to before, or None if undefined."""
        return self.after / self.before if self.before and self.after is not None else None


@dataclasses.dataclass(frozen=True)
class Diff(Report):
    """The difference between two steps.

    Attributes:
        titles: Titles of the two reports, with the names that the caller gave them.
        changes: Figures that differ: memory by category, traffic by kind and mesh axes, bounds.
        specs: Parameters that are placed differently, by path, with their PartitionSpecs before
            and after. None if a step has no such parameter.
        new_faults, mended_faults: Codes and places of faults that only one of the steps has.
    """

    titles: tuple[str, str]
    changes: tuple[FigureChange, ...]
    specs: Mapping[str, tuple[str | None, str | None]]
    new_faults: tuple[str, ...]
    mended_faults: tuple[str, ...]

    def parts(self) -> Iterator[Table | str]:
        yield from (f"before: {self.titles[0]}", f"after:  {self.titles[1]}")
        if not (self.changes or self.specs or self.new_faults or self.mended_faults):
            yield "the steps do not differ"
            return
        rows = [_row(change) for change in self.changes]
        yield Table("what changes", ("what", "before>", "after>", "ratio>"), rows)
        if self.specs:
            placed = [(path, str(a or "-"), str(b or "-")) for path, (a, b) in self.specs.items()]
            yield Table("parameters placed otherwise", ("parameter", "before", "after"), placed)
        yield from (f"new fault: {fault}" for fault in self.new_faults)
        yield from (f"fixed fault: {fault}" for fault in self.mended_faults)

    def to_dict(self) -> dict[str, Any]:
        """Returns the difference as plain data for JSON."""
        return dataclasses.asdict(self)


def diff(before: StepFacts, after: StepFacts, *, names: tuple[str, str] | None = None) -> Diff:
    """Returns the difference between two reports.

    Args:
        before, after: The reports.
        names: Names for the reports, such as their configs.
    """
    titles = (before.title(), after.title())
    if names is not None:
        titles = (f"{names[0]}: {titles[0]}", f"{names[1]}: {titles[1]}")
    old, new = _figures(before), _figures(after)
    changes = tuple(
        FigureChange(what, old.get(what), new.get(what), _unit(what))
        for what in {**old, **new}
        if old.get(what) != new.get(what)
    )
    placed = _specs(before), _specs(after)
    specs = {
        path: (placed[0].get(path), placed[1].get(path))
        for path in {**placed[0], **placed[1]}
        if placed[0].get(path) != placed[1].get(path)
    }
    faults = [{f"{f.code} {f.place}" for f in report.findings} for report in (before, after)]
    return Diff(
        titles,
        changes,
        specs,
        tuple(sorted(faults[1] - faults[0])),
        tuple(sorted(faults[0] - faults[1])),
    )


def _figures(report: StepFacts) -> dict[str, float]:
    """Returns the figures of a report by name. Names of figures in seconds end with `time`."""
    figures: dict[str, float] = {"peak memory": report.memory.peak_bytes}
    for name, size in report.memory.categories.items():
        figures[f"memory: {name.replace('_', ' ')}"] = size
    for collective in report.program.collectives:
        name = f"sent: {collective.kind} over {axes_text(collective.mesh_axes)}"
        figures[name] = figures.get(name, 0.0) + collective.sent_bytes
    if report.roofline is not None:
        for name, seconds in report.roofline.seconds.items():
            if seconds is not None:
                figures[f"{name} time"] = seconds
    return figures


def _unit(what: str) -> str:
    return "s" if what.endswith(" time") else "bytes"


def _specs(report: StepFacts) -> dict[str, str]:
    rows = report.params.rows if report.params is not None else ()
    return {row.path: spec_text(row.spec) for row in rows if row.section == "params"}


def _row(change: FigureChange) -> tuple[str, str, str, str]:
    texts = [_text(value, change.unit) for value in (change.before, change.after)]
    ratio = "" if change.ratio is None else f"{change.ratio:.3g}x"
    return change.what, *texts, ratio  # type: ignore[return-value]


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return humanize.size(value) if unit == "bytes" else humanize.duration(value)
