"""Time of the collectives of a compiled step on a cluster's links, and their overlap with compute.

Seconds come from `shardlib.cost.machine.fabric`: a start-up and a bandwidth term for the links of
each mesh axis. A collective over several axes runs along all sides of a torus at once, as for the
planner; between GPUs it is hierarchical: each axis carries what the faster axes after it leave
(Thakur et al. 2005).
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from shardlib.cost.layout import AXES, Layout
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.fabric import Link, links, seconds_in_turn
from shardlib.cost.machine.rates import rates
from shardlib.explain.analysis.collectives import Collective, ProgramReport
from shardlib.explain.analysis.kernel_cost import KernelCosts
from shardlib.explain.hlo.replica_groups import KINDS
from shardlib.explain.hlo.text import Instruction, Module
from shardlib.hardware import Cluster

Fabric = Literal["ici", "nvlink", "pcie", "network"]
Overlap = Literal["overlapped", "blocking", "unscheduled", "unknown"]
"""`overlapped`: computation runs between its start and its end. `blocking`: nothing runs during it.
`unscheduled`: the program is compiled at reduced optimization, without a schedule."""


@dataclasses.dataclass(frozen=True)
class Flow:
    """One collective of a step on a cluster.

    Attributes:
        collective: The collective instruction.
        seconds: Seconds of all its executions in a step, by fabric; empty if unknown.
        overlap: Its overlap with computation.
        overlappable: Share of its time covered by computation between its start and its end; None
            if unknown. Computation that overlaps several collectives over one fabric covers no more
            than its own time in total; the earliest start comes first.
        note: The reason why seconds or overlap are unknown, else empty.
    """

    collective: Collective
    seconds: Mapping[Fabric, float]
    overlap: Overlap
    overlappable: float | None
    note: str = ""

    @property
    def total_seconds(self) -> float | None:
        """Seconds over all fabrics, or None if unknown."""
        return sum(self.seconds.values()) if self.seconds else None

    @property
    def hidden_seconds(self) -> float | None:
        """Seconds during which computation runs, or None if unknown."""
        if self.total_seconds is None or self.overlappable is None:
            return None
        return self.total_seconds * self.overlappable


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind over the same axes and fabric.

    `seconds` and `hidden_seconds` leave out instructions of unknown time; `unknown` counts them.
    `sources` are source lines with their parts of the model and passes, largest traffic first.
    """

    kind: str
    mesh_axes: tuple[str, ...] | None
    between_slices: bool
    fabric: str
    count: int
    sent_bytes: float
    seconds: float
    hidden_seconds: float
    overlaps: tuple[Overlap, ...]
    unknown: int
    sources: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...]


def collective_times(
    program: ProgramReport,
    cluster: Cluster,
    module: Module | None = None,
    *,
    scheduled: bool = True,
) -> tuple[Flow, ...]:
    """Returns the time of every collective of a program, largest traffic first. Overlap is read
    from the parsed program, if it is given and has the order of a run (`scheduled`)."""
    network = _Network(cluster, program.mesh, program.slices)
    schedule = _Schedule(module, cluster) if module and scheduled else None
    absent: Overlap = "unscheduled" if module else "unknown"
    flows = [_flow(collective, network, schedule, absent) for collective in program.collectives]
    return _largest_first(flows)


def untimed(program: ProgramReport) -> tuple[Flow, ...]:
    """Returns the collectives of a program without times, for unknown links."""
    return _largest_first([Flow(each, {}, "unknown", None) for each in program.collectives])


def _largest_first(flows: list[Flow]) -> tuple[Flow, ...]:
    return tuple(sorted(flows, key=lambda flow: -flow.collective.sent_bytes))


def rows(flows: tuple[Flow, ...]) -> tuple[CollectiveRow, ...]:
    """Returns the flows grouped by kind, mesh axes and fabric, longest time first."""
    groups: dict[tuple[str, tuple[str, ...] | None, bool], list[Flow]] = collections.defaultdict(
        list
    )
    for flow in flows:
        c = flow.collective
        groups[c.kind, c.mesh_axes, c.between_slices].append(flow)
    unsorted = [_row(*key, members) for key, members in groups.items()]
    return tuple(sorted(unsorted, key=lambda row: (-row.seconds, -row.sent_bytes)))


def _row(
    kind: str, axes: tuple[str, ...] | None, between_slices: bool, flows: list[Flow]
) -> CollectiveRow:
    fabrics = dict.fromkeys(name for flow in flows for name in flow.seconds)
    seconds = [flow.total_seconds or 0.0 for flow in flows]
    by_size = sorted(flows, key=lambda flow: -flow.collective.sent_bytes)
    collectives = [flow.collective for flow in by_size]
    places = [(c.source, c.model_path, c.phase) for c in collectives]
    return CollectiveRow(
        kind,
        axes,
        between_slices,
        "+".join(fabrics) or "?",
        sum(flow.collective.count for flow in flows),
        sum(flow.collective.sent_bytes for flow in flows),
        sum(seconds),
        sum(flow.hidden_seconds or 0.0 for flow in flows),
        tuple(dict.fromkeys(flow.overlap for flow in flows)),
        sum(flow.total_seconds is None for flow in flows),
        tuple(dict.fromkeys(place for place in places if any(place))),
        tuple(dict.fromkeys(flow.note for flow in flows if flow.note)),
    )


def _flow(
    collective: Collective, network: "_Network", schedule: "_Schedule | None", absent: Overlap
) -> Flow:
    once, note = network.seconds(collective)
    seconds: dict[Fabric, float] = {name: each * collective.count for name, each in once.items()}
    if schedule is None:
        note = note or ("the program is not available" if absent == "unknown" else "")
        return Flow(collective, seconds, absent, None, note)
    needed = sum(once.values())
    overlap, hidden = schedule.overlap(collective, "+".join(once), needed)
    share = None
    if overlap == "blocking":
        share = 0.0
    elif overlap == "overlapped" and seconds:
        share = min(hidden / needed, 1.0) if needed else 1.0
    return Flow(collective, seconds, overlap, share, note)


@dataclasses.dataclass(frozen=True)
class _Network:
    """The links of a cluster by mesh axis."""

    cluster: Cluster
    mesh: Mapping[str, int]
    outer: Mapping[str, int]
    """Number of slices that each axis crosses."""

    @functools.cached_property
    def inner(self) -> dict[str, int]:
        """Number of devices of each axis within a slice."""
        return {name: size // self.outer.get(name, 1) for name, size in self.mesh.items()}

    @functools.cached_property
    def slots(self) -> dict[str, str]:
        """The planner's axis that stands for each mesh axis; only the order matters."""
        names = [name for name, size in self.mesh.items() if size > 1]
        if names == [name for name in AXES if name in names]:
            return {name: name for name in names}
        slots = AXES[1:] if len(names) < len(AXES) else AXES
        return dict(zip(names, slots, strict=False))

    @functools.cached_property
    def links(self) -> dict[str, Link] | None:
        """The link of each mesh axis within a slice, and of `slices`; None without a chip."""
        if self.cluster.chip is None:
            return None
        by_slot = self._within(self._sizes)
        named = {name: by_slot[slot] for name, slot in self.slots.items()}
        if (slices := self.cluster.num_slices) > 1:
            whole = Layout(data=slices, fsdp=self.cluster.num_devices // slices, slices=slices)
            named["slices"] = links(self.cluster, whole, committed())["slices"]
        return named

    @property
    def _sizes(self) -> dict[str, int]:
        return {slot: self.inner[name] for name, slot in self.slots.items()}

    def _within(self, sizes: Mapping[str, Any]) -> dict[str, Link]:
        """Returns the links of a layout within a slice."""
        slices = self.cluster.num_slices
        one = dataclasses.replace(
            self.cluster, num_hosts=self.cluster.num_hosts // slices, num_slices=1
        )
        return links(one, Layout(**sizes), committed())

    def _joint(self, axes: Sequence[str]) -> Link:
        """Returns the link of several axes together, which on a torus are one axis of as many
        devices: a collective runs along all its sides at once."""
        first, *others = (self.slots[name] for name in axes)
        size = math.prod(self.inner[name] for name in axes)
        return self._within({**self._sizes, **dict.fromkeys(others, 1), first: size})[first]

    def seconds(self, collective: Collective) -> tuple[dict[Fabric, float], str]:
        """Returns the seconds of one execution by fabric, and the reason if they are unknown."""
        if self.links is None:
            return {}, f"the links of {self.cluster.name} are not known"
        if collective.mesh_axes is None:
            return {}, "its groups match no mesh axes"
        if len(self.slots) < sum(size > 1 for size in self.mesh.values()):
            return {}, f"meshes of more than {len(AXES)} axes are not modelled"
        if collective.between_slices:
            link = self._of_size(self.links["slices"], collective.group_size)
            return {"network": link.seconds(collective.kind, collective.bytes)}, ""
        axes = [axis for axis in collective.mesh_axes if axis in self.links]
        kind, size = collective.kind, collective.bytes
        if kind in ("collective-permute", "collective-broadcast"):
            each = {axis: self.links[axis].seconds(kind, size) for axis in axes}
            slowest = max(axes, key=each.__getitem__, default=None)
            return ({} if slowest is None else {self.fabric(slowest): each[slowest]}), ""
        if len(axes) > 1 and self.fabric(axes[0]) == "ici":
            link = self._of_size(self._joint(axes), collective.group_size)
            return {"ici": link.seconds(kind, size)}, ""
        crossed = [self.links[axis] for axis in reversed(axes)]
        if len(axes) == 1:
            crossed = [self._of_size(crossed[0], collective.group_size)]
        by_fabric: dict[Fabric, float] = collections.defaultdict(float)
        times = seconds_in_turn(crossed, kind, size)
        for axis, seconds in zip(reversed(axes), times, strict=True):
            by_fabric[self.fabric(axis)] += seconds
        return dict(by_fabric), ""

    @staticmethod
    def _of_size(link: Link, size: int) -> Link:
        return dataclasses.replace(link, size=size) if 1 < size < link.size else link

    def fabric(self, axis: str) -> Fabric:
        """Returns the fabric between the devices along an axis, within a slice."""
        chip = self.cluster.chip
        if chip is None or chip.kind == "tpu":
            return "network" if chip is None else "ici"
        names = list(self.mesh)
        reach = math.prod(self.mesh[name] for name in names[names.index(axis) :])
        if self.cluster.devices_per_domain % reach:
            return "network"
        return "nvlink" if chip.nvlink_bytes_per_second else "pcie"


@dataclasses.dataclass(frozen=True)
class _Schedule:
    """The instructions of a scheduled program between the start and the end of a collective."""

    module: Module
    cluster: Cluster
    _left: dict[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    """Remaining seconds of an instruction, by fabric and name, that hide no collective yet."""

    @functools.cached_property
    def _work(self) -> KernelCosts:
        return KernelCosts(self.module)

    def overlap(self, collective: Collective, fabric: str, needed: float) -> tuple[Overlap, float]:
        """Returns the overlap of a collective, and the seconds of it that computation hides."""
        where, instruction = self.module.located[collective.name]
        if '"is_sync":true' in instruction.attributes.get("backend_config", ""):
            return "blocking", 0.0
        alongside, hidden = False, 0.0
        for outer, each in self._during(where, instruction):
            seconds = self._seconds(outer, each)
            left = self._left.setdefault((fabric, each.name), seconds)
            taken = min(left, needed - hidden)
            self._left[fabric, each.name] = left - taken
            alongside, hidden = alongside or seconds > 0, hidden + taken
        return ("overlapped" if alongside else "blocking"), hidden

    def _during(self, where: str, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Yields the instructions between the start and the end of a collective, with their
        computations."""
        if _starts(instruction):
            yield from self._between(where, instruction)
        for outer, caller in self.module.callers.get(where, ()):
            if _starts(caller):
                yield from self._between(outer, caller)
            elif caller.opcode == "fusion":
                yield from self._between_parts(outer, _channel(instruction))

    def _between(self, where: str, start: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Yields the instructions between a start and the first reader of its result."""
        inside, carried = False, {start.name}
        for instruction in self.module.computations[where]:
            if instruction.name == start.name:
                inside = True
            elif inside and carried & set(instruction.operand_names):
                if not instruction.opcode.endswith("-update"):
                    return
                carried.add(instruction.name)
            elif inside:
                yield where, instruction

    def _between_parts(self, where: str, channel: str) -> Iterator[tuple[str, Instruction]]:
        """Yields the instructions between the first and the last fusion of a collective on TPU.

        The compiler divides it into fusions with the same channel: one starts it, some compute
        while it runs, and one ends it.
        """
        parts = self._parts.get((where, channel), [])
        if len(parts) > 1:
            for instruction in self.module.computations[where][parts[0] + 1 : parts[-1]]:
                yield where, instruction

    @functools.cached_property
    def _parts(self) -> dict[tuple[str, str], list[int]]:
        """The positions of the fusions that hold a collective, by computation and channel."""
        fused = collections.defaultdict(set)
        for computation, instruction in self.module.each(*KINDS):
            for where, caller in self.module.callers.get(computation, ()):
                if caller.opcode == "fusion" and _channel(instruction):
                    fused[caller.name].add((where, _channel(instruction)))
        parts = collections.defaultdict(list)
        for instructions in self.module.computations.values():
            for position, instruction in enumerate(instructions):
                for key in fused.get(instruction.name, ()):
                    parts[key].append(position)
        return dict(parts)

    def _seconds(self, where: str, instruction: Instruction) -> float:
        chip = self.cluster.chip
        if chip is None or instruction.opcode.endswith(("-start", "-done")):
            return 0.0
        if instruction.opcode == "while":
            trips = self.module.trips(instruction) or 1
            body = instruction.attributes["body"].lstrip("%")
            inner = self.module.computations.get(body, ())
            return trips * sum(self._seconds(body, each) for each in inner)
        peak = rates(chip, "fp16" if chip.bf16_flops is None else "bf16", committed())
        computed = self._work.flops_of(where, instruction) / peak.flops
        return max(computed, self._work.bytes_of(where, instruction) / peak.memory)


def _starts(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("-start") or instruction.opcode == "send"


def _channel(instruction: Instruction) -> str:
    return instruction.attributes.get("channel_id", "")
