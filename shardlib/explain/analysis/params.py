"""Report on a training state: the sharding of each leaf, its reason and its cost."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtyping import PyTree

from shardlib import humanize
from shardlib.mesh import entry_axes, mesh_sizes
from shardlib.nn.stages import StageCut, layers_before
from shardlib.rules import AxisRules, Choice
from shardlib.rules.resolve import STAGE
from shardlib.sharding.partition import OVERRIDES, Placement
from shardlib.tables import Report, Table

SECTIONS = ("params", "model_state", "opt_state")


@dataclasses.dataclass(frozen=True)
class Row:
    """One leaf of the state.

    `refused` lists the rejected alternatives of a rule with reasons. `absent_mesh_axes` lists the
    mesh axes of size 1, which shard nothing. `copies` is the number of devices that hold each byte.
    `replicated_bytes` counts the bytes beyond the first copy, over all devices. `asked_for` is
    whether the rules ask for the leaf's replication. `fell_back` is whether a dim that does not
    divide kept it from being sharded further. `memory_kind` is None for device memory; in host
    memory, `bytes_per_device` is each device's share of it.
    """

    section: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...] | None
    origin: str
    spec: tuple[Any, ...]
    refused: tuple[str, ...]
    absent_mesh_axes: tuple[str, ...]
    note: str
    bytes_total: int
    bytes_per_device: int
    copies: int
    asked_for: bool
    fell_back: bool
    memory_kind: str | None = None

    @property
    def replicated_bytes(self) -> int:
        return self.bytes_total * (self.copies - 1)

    def cuts(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the number of shards of each dim."""
        entries = [*self.spec, *[None] * (len(self.shape) - len(self.spec))]
        return tuple(math.prod(mesh[axis] for axis in entry_axes(entry)) for entry in entries)


@dataclasses.dataclass(frozen=True)
class ReplicatedLeaf:
    """A leaf that is more replicated than the rules ask for."""

    path: str
    bytes_per_device: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({humanize.size(self.bytes_per_device)}) is replicated: {self.reason}"


@dataclasses.dataclass(frozen=True)
class ParamsReport(Report):
    """A table of all leaves, totals, and accidental replication. `str()` draws it.

    `choices` holds other choices of the run with their reasons, by name, if known.
    `stage_cut` is the cut of the layers into pipeline stages, if there are any.
    """

    mesh: Mapping[str, int]
    rows: tuple[Row, ...]
    unused_rules: tuple[str, ...]
    unused_paths: tuple[str, ...]
    choices: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stage_cut: StageCut | None = None

    @property
    def layers_by_stage(self) -> tuple[int, ...]:
        """The number of layers on each pipeline stage; empty without stages."""
        return () if self.stage_cut is None else self.stage_cut.by_stage

    def total_bytes(self, section: str | None = None) -> int:
        """Returns the bytes of all leaves of a section, each counted once."""
        return sum(r.bytes_total for r in self.rows if section in (None, r.section))

    def bytes_per_device(self, section: str | None = None) -> int:
        """Returns the bytes that each device holds in device memory."""
        return self._share(section, in_host=False)

    def host_bytes_per_device(self, section: str | None = None) -> int:
        """Returns the bytes that each device has in host memory."""
        return self._share(section, in_host=True)

    def _share(self, section: str | None, *, in_host: bool) -> int:
        return sum(
            row.bytes_per_device
            for row in self.rows
            if section in (None, row.section) and (row.memory_kind is not None) == in_host
        )

    def num_params(self) -> int:
        """Returns the number of trained scalars."""
        return sum(math.prod(r.shape) for r in self.rows if r.section == "params")

    def faults(self, threshold_bytes: int = 2**20) -> list[ReplicatedLeaf]:
        """Returns the leaves that are more replicated than the rules ask for.

        Each device holds at least `threshold_bytes` of such a leaf. Either a size that does not
        divide kept a rule from sharding it further, or it is whole on every device because this
        mesh lacks the axis. A rule whose first alternative is `None` asks for replication.
        """
        num_devices = math.prod(self.mesh.values())
        return [
            ReplicatedLeaf(row.path, row.bytes_per_device, "; ".join(_why(row)))
            for row in self.rows
            if num_devices > 1
            and not row.asked_for
            and (row.fell_back or row.copies == num_devices)
            and row.bytes_per_device >= threshold_bytes
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON."""
        return {
            "mesh": dict(self.mesh),
            "num_params": self.num_params(),
            "bytes_total": {s: self.total_bytes(s) for s in SECTIONS},
            "bytes_per_device": {s: self.bytes_per_device(s) for s in SECTIONS},
            "unused_rules": list(self.unused_rules),
            "unused_paths": list(self.unused_paths),
            "choices": dict(self.choices),
            "layers_by_stage": list(self.layers_by_stage),
            "rows": [
                {**dataclasses.asdict(r), "replicated_bytes": r.replicated_bytes} for r in self.rows
            ],
        }

    def choice_lines(self) -> list[str]:
        """Returns a line for the layers of the stages, if there are any, and one for each choice
        of the run."""
        layers = humanize.repeats(self.layers_by_stage)
        lines = [f"layers on stages: {layers}"] if layers else []
        return [*lines, *(f"{name}: {text}" for name, text in self.choices.items())]

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def parts(self) -> Iterator[Table | str]:
        columns = ("parameter", "shape", "dtype", "logical axes", "spec", "why")
        rows = [_cells(row) for row in self.rows if row.section != "opt_state"]
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        columns += ("per device>", "replicated>")
        yield Table(f"parameters on mesh {mesh}", columns, rows)
        for section in SECTIONS:
            total, each = self.total_bytes(section), self.bytes_per_device(section)
            if total:
                name = section.replace("_", " ")
                host = self.host_bytes_per_device(section)
                rest = f", {humanize.size(host)} for each in host memory" if host else ""
                share = f"{humanize.size(each)} on each device{rest}"
                yield f"{name}: {humanize.size(total)} in all, {share}"
        yield f"state: {humanize.size(self.bytes_per_device())} on each device"
        yield from self.choice_lines()
        if self.unused_paths:
            yield f"path rules that no parameter matched: {', '.join(self.unused_paths)}"
        if self.unused_rules:
            yield f"rules that no parameter used: {', '.join(self.unused_rules)}"


def explain_params(state: PyTree) -> ParamsReport:
    """Returns the report on a training state, concrete or abstract; see `shardlib.explain`."""
    definition = state.definition
    sizes = mesh_sizes(definition.scope.mesh)
    num_devices = math.prod(sizes.values())
    rows = tuple(
        _row(section, placement, sizes, num_devices)
        for section in SECTIONS
        for placement in getattr(definition, section).values()
    )
    placements = [*definition.params.values(), *definition.model_state.values()]
    return ParamsReport(
        sizes,
        rows,
        *_unused(definition.scope.rules, placements),
        stage_cut=_stage_cut(placements, sizes),
    )


def _stage_cut(placements: list[Placement], sizes: Mapping[str, int]) -> StageCut | None:
    counts = [p.shape[0] for p in placements if p.has_stages]
    return StageCut(max(counts), sizes[STAGE], 1, layers_before(placements)) if counts else None


def _row(section: str, placement: Placement, sizes: Mapping[str, int], num_devices: int) -> Row:
    shards = placement.shards(sizes)
    choices = placement.resolution.choices
    absent = [
        name
        for choice in choices
        for refusal in choice.refused
        if refusal.cause == "size_one"
        for name in refusal.alternative
    ]
    return Row(
        section,
        placement.path,
        placement.shape,
        str(placement.dtype),
        placement.logical_axes,
        placement.origin,
        tuple(placement.spec),
        tuple(reason for choice in choices if (reason := _refused(choice))),
        tuple(dict.fromkeys(absent)),
        placement.note,
        placement.num_bytes,
        placement.num_bytes // shards,
        num_devices // shards,
        asked_for=placement.asked_for,
        fell_back=any(choice.fell_back for choice in choices),
        memory_kind=placement.memory_kind,
    )


def _refused(choice: Choice) -> str:
    reasons = [r for r in choice.refused if r.cause != "size_one"]
    text = "; ".join(f"not {'+'.join(r.alternative)}: {r.reason}" for r in reasons)
    return text and f"{choice.logical_axis}: {text}"


def _why(row: Row) -> list[str]:
    """Returns the reasons why a leaf is not sharded further."""
    reasons = list(row.refused)
    if row.copies > 1 and row.absent_mesh_axes:
        reasons.append(f"this mesh has no {', '.join(row.absent_mesh_axes)}")
    return [*reasons, row.note] if row.note else reasons


def _unused(
    rules: AxisRules, placements: list[Placement]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    used = {c.rule for p in placements for c in p.resolution.choices}
    origins = {p.origin.partition(OVERRIDES)[0] for p in placements}
    return (
        tuple(name for name, _ in rules.params if name not in used),
        tuple(pattern for pattern, _ in rules.paths if f"path {pattern}" not in origins),
    )


def _cells(row: Row) -> list[str]:
    why = [row.origin, *_why(row)]
    return [
        row.path,
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        ", ".join(name or "-" for name in row.logical_axes or ()) or "-",
        spec_text(row.spec),
        "\n".join(why),
        humanize.size(row.bytes_per_device),
        humanize.size(row.replicated_bytes) if row.copies > 1 else "-",
    ]


def spec_text(spec: Iterable[Any]) -> str:
    """Returns a spec as `fsdp, -, data+tensor`."""
    return ", ".join("+".join(entry_axes(entry)) or "-" for entry in spec)
