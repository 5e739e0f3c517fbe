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

_RING_OF = {"v5e": 16, "v6e": 16}
"""Sides of a 2D torus wrap around when they are as long as the pod."""


@dataclasses.dataclass(frozen=True)
class Link:
    """What the devices of one mesh axis exchange over, for each device, in one direction."""

    size: int
    bytes_per_second: float = math.inf
    seconds_per_collective: float = 0.0
    exchange_bytes_per_second: float = math.inf
    """Bytes/s that leave a device in an all-to-all."""

    def gather(self, total: float) -> float:
        """Returns seconds to gather arrays of `total` bytes, or to reduce and scatter them."""
        if self.size == 1 or total == 0:
            return 0.0
        part = (self.size - 1) / self.size
        return part * total / self.bytes_per_second + self.seconds_per_collective

    def all_reduce(self, total: float) -> float:
        """Returns seconds to sum an array of `total` bytes over all devices."""
        return 2 * self.gather(total)

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


def links(
    cluster: Cluster, layout: Layout, constants: Mapping[str, float], *, single_rail: bool = False
) -> dict[str, Link]:
    """Returns the link of each mesh axis, and of `slices` where several slices are joined."""
    chip = cluster.chip
    assert chip is not None, "CPU devices have no links to plan with"
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
    across = layout.slices
    for axis in reversed(AXES):
        size = layout.size(axis)
        outer = outer_degree(layout, axis)
        taken = _take(free, size // outer)
        found[axis] = _torus_link(size // outer, taken, chip.name, per_link, constants)
    network = (cluster.network_bytes_per_second_per_device or per_link) * constants["dcn"]
    found["slices"] = Link(across, network, 50e-6 * math.log2(max(across, 1)), network)
    return found


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

    Taken from the name (`v5p:4x4x8`), else as near to a square or a cube as powers of two allow.
    """
    chip = cluster.chip
    assert chip is not None
    if match := re.search(r":(\d+(?:x\d+)+)$", cluster.name):
        return tuple(int(side) for side in match[1].split("x"))
    left = cluster.num_chips // cluster.num_slices
    sides = [1] * max(chip.torus_dims, 1)
    while left > 1:
        factor = next(f for f in (2, *range(3, left + 1, 2)) if left % f == 0)
        sides[sides.index(min(sides))] *= factor
        left //= factor
    return tuple(sorted(sides))
