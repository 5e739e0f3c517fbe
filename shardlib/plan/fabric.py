"""Time of collectives: a start-up term and a bandwidth term, by what links an axis runs over.

Ring algorithms over n devices: gathering, or reducing and scattering, V bytes in all moves
(n - 1) / n V through each device; an all-reduce does both (Thakur et al. 2005, "Optimization of
Collective Communication Operations in MPICH"; Austin et al. 2025, "How to Scale Your Model",
ch. 3, for the torus).

torus   An axis that covers k dims of the torus uses the links of all k; with wrap-around both
        directions of a ring carry data, on a line the bandwidth of one direction counts.
nvlink  Devices of one domain exchange at the bandwidth of all their links.
hosts   A ring over hosts enters each host once. The m members of an axis within a host share the
        host's network with those of parallel groups: they have m NICs.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping

from shardlib.hardware import Cluster
from shardlib.plan.layout import AXES, Layout
from shardlib.plan.measured import Calibration, Line, MeasuredCluster

_RING_OF = {"v5e": 16, "v6e": 16}
"""Sides of a 2D torus wrap around when they are as long as the pod."""
_START_SECONDS = 50e-6
"""To start a collective between slices, for each doubling of their number."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What the devices of one mesh axis exchange over, for each device, in one direction."""

    size: int
    bytes_per_second: float = math.inf
    seconds_per_collective: float = 0.0
    exchange_bytes_per_second: float = math.inf
    """Bytes/s that leave a device in an all-to-all."""

    def gather(self, total: float, pieces: float = 1.0) -> float:
        """Returns seconds to gather arrays of `total` bytes together.

        `pieces` of them travel one after the other. They matter where starting a collective was
        measured; elsewhere starts are taken to lie behind the transfer before, but for one.
        """
        if self.size == 1 or total == 0:
            return 0.0
        part = (self.size - 1) / self.size
        return part * total / self.bytes_per_second + self.seconds_per_collective

    def reduce_scatter(self, total: float, pieces: float = 1.0) -> float:
        """Returns seconds to sum arrays of `total` bytes, each device keeping its part."""
        return self.gather(total, pieces)

    def all_reduce(self, total: float, pieces: float = 1.0) -> float:
        """Returns seconds to sum arrays of `total` bytes over all devices."""
        return self.reduce_scatter(total, pieces) + self.gather(total, pieces)

    def all_to_all(self, held: float) -> float:
        """Returns seconds in which each device sends `held` bytes, an equal part to each."""
        if self.size == 1 or held == 0:
            return 0.0
        part = (self.size - 1) / self.size
        return part * held / self.exchange_bytes_per_second + self.seconds_per_collective

    def shift(self, held: float) -> float:
        """Returns seconds to pass `held` bytes to the next device."""
        if self.size == 1:
            return 0.0
        return held / self.bytes_per_second + self.seconds_per_collective / self.size


@dataclasses.dataclass(frozen=True)
class MeasuredLink(Link):
    """A link by what its collectives took."""

    lines: Mapping[str, Line] = dataclasses.field(default_factory=dict)

    def gather(self, total: float, pieces: float = 1.0) -> float:
        return self._seconds("all_gather", total, pieces)

    def reduce_scatter(self, total: float, pieces: float = 1.0) -> float:
        return self._seconds("reduce_scatter", total, pieces)

    def all_reduce(self, total: float, pieces: float = 1.0) -> float:
        return self._seconds("all_reduce", total, pieces)

    def all_to_all(self, held: float) -> float:
        return self._seconds("all_to_all", held, 1.0)

    def shift(self, held: float) -> float:
        return self._seconds("shift", held, 1.0)

    def _seconds(self, kind: str, num_bytes: float, pieces: float) -> float:
        return self.lines[kind](num_bytes, pieces) if self.size > 1 and num_bytes else 0.0


def links(
    cluster: Cluster, layout: Layout, constants: Mapping[str, float], *, single_rail: bool = False
) -> dict[str, Link]:
    """Returns the link of each mesh axis, and of `slices` where several slices are joined."""
    if isinstance(cluster, MeasuredCluster):
        return _measured_links(cluster.measured, layout)
    chip = cluster.chip
    assert chip is not None, "CPU devices have no links to plan with, unless they were measured"
    if chip.kind == "tpu":
        return _torus_links(cluster, layout, constants)
    return _gpu_links(cluster, layout, constants, single_rail)


def _gpu_links(
    cluster: Cluster, layout: Layout, constants: Mapping[str, float], single_rail: bool
) -> dict[str, Link]:
    chip = cluster.chip
    assert chip is not None
    domain = min(cluster.devices_per_host, max(chip.nvlink_chips, 1))
    local = (chip.nvlink_bytes_per_second or chip.pcie_bytes_per_second or 0.0) or 1e9
    local *= constants["nvlink"]
    nic = (cluster.network_bytes_per_second_per_device or local) * constants["nic"]
    hop = constants["hop_seconds"]
    found, stride = {}, 1
    for axis in reversed(AXES):
        size = layout.size(axis)
        inside = max(1, min(size, domain // stride))
        while size % inside:
            inside -= 1
        hosts = size // inside
        speed, exchange = local, local
        if hosts > 1:
            speed = min(local, nic * (1 if single_rail else inside))
            exchange = min(local, nic * size / (size - inside))
        # NCCL builds trees over hosts where rings would be slow to start.
        steps = inside - 1 + 2 * 3 * math.log2(hosts)
        found[axis] = Link(size, speed, hop * steps, exchange)
        stride *= size
    return found


def _torus_links(
    cluster: Cluster, layout: Layout, constants: Mapping[str, float]
) -> dict[str, Link]:
    chip = cluster.chip
    assert chip is not None
    per_link = chip.ici_achievable_bytes_per_second_per_link
    per_link = per_link or 0.9 * (chip.ici_bytes_per_second_per_link or 0.0)
    per_link *= constants["ici"] / chip.devices_per_chip
    free = [[side, side] for side in slice_shape(cluster)]
    if chip.devices_per_chip > 1:
        free.append([chip.devices_per_chip, chip.devices_per_chip])
    found = {}
    for axis in reversed(AXES):
        size = layout.size(axis)
        outer = outer_degree(layout, axis)
        taken = _take(free, size // outer)
        found[axis] = _torus_link(size // outer, taken, chip.name, per_link, constants)
    network = (cluster.network_bytes_per_second_per_device or per_link) * constants["dcn"]
    across = outer_degree(layout, "fsdp")
    if across > 1:
        found["fsdp"] = _across(found["fsdp"], across, network)
    replicas = max(layout.slices // across, 1)
    found["slices"] = Link(replicas, network, _START_SECONDS * math.log2(replicas), network)
    return found


def _across(inner: Link, outer: int, network: float) -> Link:
    """Link of an axis that crosses slices: of what it gathers each device fetches its part from the
    other slices, and then the slice shares the parts."""
    size = inner.size * outer
    seconds = (inner.size - 1) / (inner.size * inner.bytes_per_second)
    seconds += (outer - 1) / (size * network)
    starts = inner.seconds_per_collective + _START_SECONDS * math.log2(outer)
    exchange = min(inner.exchange_bytes_per_second, network)
    return Link(size, (size - 1) / (size * seconds), starts, exchange)


def outer_degree(layout: Layout, axis: str) -> int:
    """Returns how many slices an axis crosses: `data` what it can, `fsdp` what is left."""
    data = math.gcd(layout.slices, layout.data)
    return {"data": data, "fsdp": math.gcd(layout.slices // data, layout.fsdp)}.get(axis, 1)


def _torus_link(
    size: int,
    taken: list[tuple[int, int]],
    chip_name: str,
    per_link: float,
    constants: Mapping[str, float],
) -> Link:
    """Link of an axis that takes (part, side) of some dims of the torus."""
    count, steps, exchange = 0, 0.0, math.inf
    for part, side in taken:
        ring = part == side and part > 2 and _wraps(chip_name, side)
        count += 2 if ring else 1
        steps += part / 2 if ring else part - 1
        # The middle of a ring of n is crossed by n / 8 of what each holds, of a line by n / 4.
        exchange = min(exchange, per_link * (8 if ring else 4) / part)
    speed = per_link * max(count, 1)
    return Link(size, speed, constants["hop_seconds"] * steps, min(exchange, speed))


def _wraps(chip_name: str, side: int) -> bool:
    return side == _RING_OF[chip_name] if chip_name in _RING_OF else side % 4 == 0


def _take(free: list[list[int]], size: int) -> list[tuple[int, int]]:
    """Takes parts of the free (remaining, side) dims, whole dims first."""
    taken = []
    while size > 1:
        options = [dim for dim in free if math.gcd(dim[0], size) > 1]
        if not options:
            taken.append((size, size))
            break
        dim = max(options, key=lambda d: (d[0] == size, size % d[0] == 0, math.gcd(d[0], size)))
        part = math.gcd(dim[0], size)
        taken.append((part, dim[1]))
        dim[0] //= part
        size //= part
    return taken


@functools.cache
def slice_shape(cluster: Cluster) -> tuple[int, ...]:
    """Returns the sides of one slice of a TPU cluster, in chips.

    Taken from the name (`v5p:4x4x8`), else as near to a square or a cube as its factors allow.
    """
    chip = cluster.chip
    assert chip is not None
    if match := re.search(r":(\d+(?:x\d+)+)$", cluster.name):
        return tuple(int(side) for side in match[1].split("x"))
    left = cluster.num_chips // cluster.num_slices
    sides = [1] * max(chip.torus_dims, 1)
    for factor in reversed(_factors(left)):
        sides[sides.index(min(sides))] *= factor
    return tuple(sorted(sides))


def _factors(number: int) -> list[int]:
    """Prime factors in ascending order."""
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1 if factor == 2 else 2
    return found


def _measured_links(calibration: Calibration, layout: Layout) -> dict[str, Link]:
    """Returns the link of each mesh axis.

    XLA on CPU knows no sum that is scattered: it sums, and each device cuts out its part.
    """
    found: dict[str, Link] = {}
    for axis in AXES:
        size = layout.size(axis)
        if size == 1:
            found[axis] = Link(1)
            continue
        lines = {kind: _of_size(by_size, size) for kind, by_size in calibration.collectives.items()}
        if calibration.platform == "cpu":
            lines["reduce_scatter"] = lines["all_reduce"]
        found[axis] = MeasuredLink(size, lines=lines)
    return found


def _of_size(by_size: Mapping[int, Line], size: int) -> Line:
    """The line of a group of `size` devices, or of the next larger one that was measured."""
    larger = [known for known in by_size if known >= size]
    return by_size[min(larger) if larger else max(by_size)]
