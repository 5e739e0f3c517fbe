"""Seconds of a training step from its costs, on the rates and links of a cluster.

A collective of t seconds that overlaps with w seconds of computation costs t - min(f t, w): a
fraction f of it, the constant of its kind, can be hidden if there is enough computation.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from shardlib.cost.costs import CollectiveCost, Costs, Overlap, StepTime, Window, Work
from shardlib.cost.layout import Layout, Software
from shardlib.cost.machine import fabric
from shardlib.cost.machine.fabric import Link
from shardlib.cost.machine.kernels import Product
from shardlib.cost.machine.rates import Rates
from shardlib.hardware import Cluster
from shardlib.nn.stages import StageCut

_PCIE = 31e9
"""Bytes/s to the host if the chip's bandwidth is not known: PCIe 4.0 x16."""
LinksOf = Callable[[tuple[str, ...]], tuple[Link, ...]]
"""Links that a collective over some mesh axes uses in turn, innermost first."""
_Group = tuple[str, float, Window]


@dataclasses.dataclass(frozen=True)
class Machine:
    """One device of a layout, with the links to the others."""

    layout: Layout
    software: Software
    cluster: Cluster
    rates: Rates
    links_of: LinksOf
    wide: Rates | None = None
    """Rates of matmuls with four-byte operands and of the optimizer's; None for `rates`."""

    def seconds(self, work: Iterable[Work]) -> dict[tuple[str, str], float]:
        """Returns the seconds of kernels by part and pass."""
        seconds_by_part: dict[tuple[str, str], float] = defaultdict(float)
        for during, part, kernel, count in work:
            wide = isinstance(kernel, Product) and (during == "optimizer" or kernel.width > 2)
            rates = self.wide if wide and self.wide is not None else self.rates
            seconds_by_part[part, during] += count * kernel.seconds(rates)
        return seconds_by_part

    def collective_seconds(self, collective: CollectiveCost) -> float:
        """Returns the seconds of one execution of a collective."""
        times = fabric.seconds_in_turn(
            self.links_of(collective.axes),
            collective.kind,
            collective.num_bytes,
            collective.pieces,
        )
        return sum(times)

    def hidden_fraction(self, overlap: Overlap | None, axes: tuple[str, ...]) -> float:
        """Returns the fraction of a collective that enough computation hides."""
        software, rates = self.software, self.rates
        if overlap is None:
            return 0.0
        if overlap == "gather":
            return rates.hide_gather if software.overlap_gather else 0.0
        if overlap == "data":
            return rates.hide_data if software.overlap_data else 0.0
        if overlap == "expert":
            return rates.hide_tensor if software.overlap_expert else 0.0
        # Decomposed matmuls read the memory of their peers, over NVLink or a torus. A network
        # offers no such reads to count on.
        if overlap == "tensor" and any(link.leaves_domain for link in self.links_of(axes)):
            return 0.0
        return rates.hide_tensor if software.overlap_tensor else 0.0

    def exposed(
        self, collectives: Iterable[CollectiveCost], windows: Mapping[Window, float]
    ) -> dict[str, float]:
        """Returns the seconds by part of collectives that computation does not hide. Those of a
        part that overlap alike share a window; all activations share one."""
        groups: dict[_Group, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for each in collectives:
            fraction = self.hidden_fraction(each.overlap, each.axes)
            shared = "" if each.overlap == "activations" else each.part
            group = groups[shared, fraction, each.window]
            group[each.part] += each.count * self.collective_seconds(each)
        exposed_seconds: dict[str, float] = defaultdict(float)
        for (_, fraction, window), parts in groups.items():
            total = sum(parts.values())
            left = hidden(total, windows[window], fraction) / total if total else 1.0
            for part, seconds in parts.items():
                exposed_seconds[part] += seconds * left
        return exposed_seconds


def hidden(seconds: float, window: float, fraction: float) -> float:
    """Returns the exposed seconds of collectives that overlap with `window` seconds of
    computation."""
    return seconds - min(fraction * seconds, max(window, 0.0))


def host_link(cluster: Cluster) -> Link | None:
    """Returns the link between one device and its host's memory; None if host memory is the
    device's own memory, as on CPUs."""
    chip = cluster.chip
    if chip is None:
        return None
    speed = (chip.pcie_bytes_per_second or _PCIE) / chip.devices_per_chip
    return Link(2, shift_bytes_per_second=speed)


def by_axis(links: Mapping[str, Link], cluster: Cluster) -> LinksOf:
    """Returns the links of collectives over one mesh axis each: `data` goes on between slices."""
    links_by_axes: dict[tuple[str, ...], tuple[Link, ...]] = {
        (axis,): (link,) for axis, link in links.items()
    }
    if "slices" in links:
        links_by_axes["data",] += (links["slices"],)
    if host := host_link(cluster):
        links_by_axes["host",] = (host,)
    return links_by_axes.__getitem__


def by_joint_axes(
    layout: Layout, cluster: Cluster, constants: Mapping[str, float], software: Software
) -> LinksOf:
    """Returns the links of collectives over several mesh axes as if they were one. From `data` they
    go on between slices."""

    @functools.cache
    def links_of(axes: tuple[str, ...]) -> tuple[Link, ...]:
        size = math.prod(layout.size(axis) for axis in axes)
        joint = dataclasses.replace(layout, **{**dict.fromkeys(axes, 1), axes[0]: size})
        links = fabric.links(cluster, joint, constants, single_rail=software.single_rail)
        between = links.get("slices") if axes[0] == "data" else None
        return (links[axes[0]],) if between is None else (links[axes[0]], between)

    return links_of


def step_time(costs: Costs, machine: Machine, *, patient: bool = False) -> StepTime:
    """Returns the seconds of a step on the busiest device.

    Args:
        costs: Costs of one microbatch and of the step.
        machine: Device with its rates and links.
        patient: Whether to assume enough computation to hide every collective.
    """
    layout, software = machine.layout, machine.software
    micro, stages = layout.microbatches, layout.stage
    spent = machine.seconds(costs.work)
    layers, head = _by_pass(spent, of_head=False), _by_pass(spent, of_head=True)
    windows = _windows(spent, layers, head if stages == 1 else {}, patient=patient)
    moved = machine.exposed(costs.collectives, windows)
    turn = sum(layers.values()) + sum(s for part, s in moved.items() if part != "data")
    in_head = sum(head.values())
    parts: dict[str, float] = defaultdict(float)
    for (part, during), seconds in spent.items():
        again = during == "recompute" and part != "head"
        parts["recompute" if again else part] += micro * seconds
    parts["head"] /= stages if software.skip_idle else 1
    for (part, _), seconds in machine.seconds(costs.work_once).items():
        parts[part] += seconds
    for part, seconds in moved.items():
        parts[part] += micro * seconds
    for part, seconds in machine.exposed(costs.collectives_once, windows).items():
        parts[part] += seconds
    parts["bubble"] = _bubble(layout, software, turn, in_head)
    parts["imbalance"] = micro * _imbalance(costs, layout, software, turn, in_head, layers)
    slowest = machine.rates.jitter * math.sqrt(2 * math.log(machine.cluster.num_hosts))
    slowest += machine.rates.skew * math.log2(layout.slices)
    return StepTime(**parts, waiting=slowest * sum(parts.values()))


def least_time(costs: Costs, machine: Machine, most_microbatches: int) -> float:
    """Returns a lower bound of the seconds of a step with any rematerialisation, and with any
    number of microbatches from the layout's to `most_microbatches`.

    Collectives hide as much as they ever can. Splitting a batch further makes no kernel and no
    collective faster; it only shortens the bubble.
    """
    time = step_time(costs, machine, patient=True)
    filled = 1 + time.waiting / max(time.total - time.waiting, 1e-30)
    idle = (1 - machine.layout.microbatches / most_microbatches) * (time.bubble + time.stage)
    return time.total - filled * (idle + time.imbalance)


def _by_pass(spent: Mapping[tuple[str, str], float], *, of_head: bool) -> dict[str, float]:
    seconds_by_pass: dict[str, float] = defaultdict(float)
    for (part, during), seconds in spent.items():
        if (part == "head") == of_head:
            seconds_by_pass[during] += seconds
    return seconds_by_pass


def _windows(
    spent: Mapping[tuple[str, str], float],
    layers: Mapping[str, float],
    head: Mapping[str, float],
    *,
    patient: bool,
) -> Mapping[Window, float]:
    if patient:
        return defaultdict(lambda: math.inf)
    forward = layers.get("forward", 0.0)
    backward = layers.get("backward", 0.0) + layers.get("recompute", 0.0)
    ending = head.get("backward", 0.0) + head.get("recompute", 0.0)
    return {
        "layers": forward + backward,
        "attention": spent["attention", "forward"] + spent["attention", "backward"],
        "forward": forward,
        "backward": backward,
        "all forward": forward + head.get("forward", 0.0),
        "all backward": backward + ending,
        "any": math.inf,
    }


def _bubble(layout: Layout, software: Software, turn: float, head: float) -> float:
    """Returns the seconds of turns that a stage does not have. If stages compute all turns, the
    turns before the first and after the last microbatch cost as much as any, including the head."""
    idle = (layout.stage - 1) / layout.chunks
    return idle * turn if software.skip_idle else 2 * idle * (turn + head)


def _imbalance(
    costs: Costs,
    layout: Layout,
    software: Software,
    turn: float,
    head: float,
    layers: Mapping[str, float],
) -> float:
    """Returns the seconds by which the slowest stage exceeds the mean, for one microbatch."""
    if layout.stage == 1 or not software.skip_idle:
        return 0.0
    parts = layout.stage * layout.chunks
    uneven = turn * (math.ceil(costs.num_layers / parts) * parts / costs.num_layers - 1)
    ahead = 0.0 if software.balance_head else head * (1 - 1 / layout.stage)
    if software.rerun_chunks:  # All chunks but the last run again, and the last stage is lighter.
        ahead -= layers["forward"] / layout.chunks
        last = StageCut(costs.num_layers, layout.stage, layout.chunks).by_stage[-1]
        ahead -= turn * (1 - last * layout.stage / costs.num_layers)
    return max(uneven, ahead)
