"""Time of collectives: a start-up term and a bandwidth term, by the links of a mesh axis.

Ring algorithms over n devices: an all-gather or a reduce-scatter of V bytes in total moves (n - 1)
/ n V through each device; an all-reduce does both (Thakur et al. 2005, "Optimization of Collective
Communication Operations in MPICH"; Austin et al. 2025, "How to Scale Your Model", ch. 3, for the
torus).

torus   An axis that covers k dims of the torus uses the links of all k. With wrap-around both
        directions of a ring carry data; on a line the bandwidth of one direction counts.
nvlink  Devices of one domain, a host or a rack of hosts, exchange at the bandwidth of all their
        links.
hosts   An axis that leaves its domain pays for both networks, one after the other. In a gather
        each device fetches its own part from the other hosts, through its own NIC, and then the
        members of a domain share their parts. With chunks so large that both networks are always
        busy only the slower one counts (Austin et al. 2025, ch. 12); layers of a model are too
        small for that.
slices  The same as hosts, over the network of the data centre.

A shift to the next device, as in rings of keys and values and between pipeline stages, uses one
link or one NIC.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping

from shardlib.cost.layout import AXES, Layout
from shardlib.cost.machine.measured import Calibration, Line, MeasuredCluster
from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.humanize import bandwidth

_RING_OF = {"v3": 32, "v5e": 16, "v6e": 16}
"""Side length at which a 2D torus wraps around, which is the side of the pod."""
_CUBE = 4
"""Side of the cubes whose optical switches provide the wrap-around of a 3D torus: slices of whole 4
x 4 x 4 cubes have it, smaller slices do not. Source: Google, "TPU v5p"; Austin et al. 2025, ch.
2."""
_SLICE_START_SECONDS = 50e-6
"""Start-up of a collective between slices, per doubling of their number: order of magnitude of a
round trip in a data centre including its software. Published runs do not separate it from
`skew`."""
_NETWORK_HOPS = 7
"""NVLink hops that take as long as one hop between hosts. Source: NVIDIA NCCL, src/graph/tuning.cc,
latencies of trees with the protocol LL128: 8.5 and 1.2 us."""
_UNMEASURED_ICI = 0.9
"""Fraction of its specified bandwidth that an unmeasured ICI link achieves: the fraction measured
on v4, v5e, v5p and v6e in Austin et al. 2025, ch. 2."""


@dataclasses.dataclass(frozen=True)
class Link:
    """Link between the devices of one mesh axis, per device, in one direction."""

    size: int
    bytes_per_second: float = math.inf
    seconds_per_collective: float = 0.0
    exchange_bytes_per_second: float = math.inf
    """Bytes/s that leave a device in an all-to-all."""
    shift_bytes_per_second: float = math.inf
    """Bytes/s from a device to the next one."""
    domains: int = 1
    """Domains, hosts or slices, between which the link includes a network."""

    @property
    def leaves_domain(self) -> bool:
        """Whether the link includes a network between hosts or slices."""
        return self.domains > 1

    def gather(self, total: float, pieces: float = 1.0) -> float:
        """Returns seconds to gather arrays of `total` bytes together.

        `pieces` of them travel one after the other. `pieces` matters for measured links. On other
        links each start hides behind the previous transfer, except for one. With 0 pieces the
        arrays travel with others that have started already.
        """
        if self.size == 1 or total == 0:
            return 0.0
        part = (self.size - 1) / self.size
        started = min(pieces, 1.0) * self.seconds_per_collective
        return part * total / self.bytes_per_second + started

    def reduce_scatter(self, total: float, pieces: float = 1.0) -> float:
        """Returns seconds to sum arrays of `total` bytes and leave each device its part."""
        return self.gather(total, pieces)

    def all_reduce(self, total: float, pieces: float = 1.0) -> float:
        """Returns seconds to sum arrays of `total` bytes over all devices."""
        return self.reduce_scatter(total, pieces) + self.gather(total, pieces)

    def all_to_all(self, held: float) -> float:
        """Returns seconds for each device to send `held` bytes, in equal parts to all devices."""
        if self.size == 1 or held == 0:
            return 0.0
        part = (self.size - 1) / self.size
        return part * held / self.exchange_bytes_per_second + self.seconds_per_collective

    def shift(self, held: float) -> float:
        """Returns seconds to pass `held` bytes to the next device."""
        if self.size == 1:
            return 0.0
        return held / self.shift_bytes_per_second + self.seconds_per_collective / self.size

    def seconds(self, kind: str, num_bytes: float, pieces: float = 1.0) -> float:
        """Returns the seconds of a collective.

        Args:
            kind: Kind as in JAX (`all_gather`), or of an HLO instruction (`all-gather`).
            num_bytes: Bytes of the array that is gathered or summed; for `all_to_all` and `shift`,
                what a device holds for the others.
            pieces: Arrays that travel one after the other.
        """
        match kind.replace("-", "_"):
            case "all_gather":
                return self.gather(num_bytes, pieces)
            case "reduce_scatter":
                return self.reduce_scatter(num_bytes, pieces)
            case "all_reduce":
                return self.all_reduce(num_bytes, pieces)
            case "all_to_all" | "ragged_all_to_all":
                return self.all_to_all(num_bytes)
            case "shift" | "collective_permute" | "collective_broadcast":
                return self.shift(num_bytes)
        raise ValueError(f"no collective is called {kind!r}.\n  Name one of this function.")


def sent_share(kind: str, devices: int) -> float:
    """Returns the share of a buffer that each of some devices sends in a collective, by ring
    algorithms.

    With n devices and a buffer of B bytes, an all-reduce sends 2 (n - 1) / n B. An all-gather, a
    reduce-scatter or an all-to-all sends (n - 1) / n B, and a permutation B.

    Args:
        kind: As in `Link.seconds`.
        devices: Their number; 0 if it is unknown, which counts as many.

    Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH".
    """
    kind = kind.replace("-", "_")
    if kind in ("shift", "collective_permute", "collective_broadcast"):
        return 1.0
    share = (devices - 1) / devices if devices else 1.0
    return 2 * share if kind == "all_reduce" else share


def seconds_in_turn(
    links: Iterable[Link], kind: str, num_bytes: float, pieces: float = 1.0
) -> list[float]:
    """Returns the seconds of a collective on each of several links, the innermost first. A link
    carries what the links before it leave. Arguments are as in `Link.seconds`."""
    shrinks = kind.replace("-", "_") in ("all_reduce", "all_gather", "reduce_scatter")
    seconds = []
    for link in links:
        seconds.append(link.seconds(kind, num_bytes, pieces))
        if shrinks:
            num_bytes /= link.size
    return seconds


@dataclasses.dataclass(frozen=True)
class MeasuredLink(Link):
    """Link with the measured times of its collectives."""

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
    """Returns the link of each mesh axis, and of `slices` if the mesh spans several slices."""
    if isinstance(cluster, MeasuredCluster):
        return _measured_links(cluster.measured, layout)
    chip = cluster.chip
    assert chip is not None, "CPU devices have no links to plan with, unless they were measured"
    if chip.kind == "tpu":
        return _torus_links(cluster, layout, constants)
    return _gpu_links(cluster, layout, constants, single_rail)


def remarks(cluster: Cluster, layout: Layout) -> list[str]:
    """Returns remarks on the links of a plan, as sentences."""
    chip = cluster.chip
    if chip is None or chip.kind != "gpu" or isinstance(cluster, MeasuredCluster):
        return []
    lines, domain = [], cluster.devices_per_domain
    if layout.tensor > domain:
        lines.append(
            f"tensor={layout.tensor} exceeds the {domain} GPUs connected without a network: its "
            "collectives pay for both, and nothing hides them."
        )
    network = cluster.network_bytes_per_second_per_device
    if (
        cluster.num_devices > domain
        and network
        and any("network" in fact for fact in chip.unverified)
    ):
        lines.append(
            f"Between hosts {bandwidth(network)} a GPU are assumed: machines with "
            f"{chip.full_name} differ (see shardlib.hardware.chips)."
        )
    return lines


def _gpu_links(
    cluster: Cluster, layout: Layout, constants: Mapping[str, float], single_rail: bool
) -> dict[str, Link]:
    chip = cluster.chip
    assert chip is not None
    domain = cluster.devices_per_domain
    local = chip.nvlink_bytes_per_second or chip.pcie_bytes_per_second
    assert local is not None, "every GPU has one of both"
    local *= constants["nvlink"]
    nic = _network_of(cluster) * constants["nic"]
    hop = constants["hop_seconds"]
    links_by_axis, stride = {}, 1
    for axis in reversed(AXES):
        size = layout.size(axis)
        inside = max(1, min(size, domain // stride))
        while size % inside:
            inside -= 1
        link = Link(inside, local, hop * (inside - 1), local, local)
        if size > inside:
            start = _NETWORK_HOPS * hop * math.log2(size // inside)
            link = _across(link, size // inside, nic, start, single_rail=single_rail)
        links_by_axis[axis] = link
        stride *= size
    return links_by_axis


def _network_of(cluster: Cluster) -> float:
    """Returns the bytes/s of a GPU between hosts; infinite with a single host.

    Raises:
        MeshError: If the network speed is not known.
    """
    if cluster.num_hosts == 1:
        return math.inf
    if network := cluster.network_bytes_per_second_per_device:
        return network
    chip = cluster.chip
    assert chip is not None
    raise MeshError(
        f"cluster {cluster.name!r}: the speed of the network between hosts of {chip.full_name} "
        f"depends on the machine, and is not known.\n"
        f"  Plan for one host, as in {cluster.devices_per_host}x{chip.name}, or for another GPU."
    )


def _torus_links(
    cluster: Cluster, layout: Layout, constants: Mapping[str, float]
) -> dict[str, Link]:
    chip = cluster.chip
    assert chip is not None
    per_link = chip.ici_achievable_bytes_per_second_per_link
    per_link = per_link or _UNMEASURED_ICI * (chip.ici_bytes_per_second_per_link or 0.0)
    per_link *= constants["ici"] / chip.devices_per_chip
    shape = slice_shape(cluster)
    free = [(side, side, _wraps(chip.name, shape, side)) for side in shape]
    if chip.devices_per_chip > 1:
        free.append((chip.devices_per_chip, chip.devices_per_chip, False))
    links_by_axis = {}
    for axis in reversed(AXES):
        size = layout.size(axis) // outer_degree(layout, axis)
        links_by_axis[axis] = _torus_link(
            size, _take(free, size), per_link, constants["hop_seconds"]
        )
    network = cluster.network_bytes_per_second_per_device
    assert network is not None, "hosts of TPUs have a network of known speed"
    network *= constants["dcn"]
    across = outer_degree(layout, "fsdp")
    if across > 1:
        start = _SLICE_START_SECONDS * math.log2(across)
        links_by_axis["fsdp"] = _across(links_by_axis["fsdp"], across, network, start)
    replicas = max(layout.slices // across, 1)
    start = _SLICE_START_SECONDS * math.log2(replicas)
    links_by_axis["slices"] = Link(replicas, network, start, network, network)
    return links_by_axis


def _across(
    inner: Link, outer: int, network: float, start: float, *, single_rail: bool = False
) -> Link:
    """Returns the link of an axis that spans `outer` domains or slices like the one of `inner`.

    Args:
        inner: Link between the members within one.
        outer: Number of domains or slices.
        network: Bytes/s of one device between them.
        start: Seconds to start a collective between them.
        single_rail: Whether all traffic into a host goes through the NIC of one device.
    """
    size = inner.size * outer
    seconds = (inner.size - 1) / (inner.size * inner.bytes_per_second)
    seconds += (outer - 1) / (network * (outer if single_rail else size))
    # The part of an all-to-all that is meant for other domains passes the NIC of its sender.
    leaving = (size - inner.size) / (size - 1)
    return Link(
        size,
        (size - 1) / (size * seconds),
        inner.seconds_per_collective + start,
        min(inner.exchange_bytes_per_second, network / leaving),
        min(inner.shift_bytes_per_second, network),
        domains=outer,
    )


def outer_degree(layout: Layout, axis: str) -> int:
    """Returns the number of slices that an axis crosses: `data` takes what it can, `fsdp` the
    rest."""
    data = math.gcd(layout.slices, layout.data)
    return {"data": data, "fsdp": math.gcd(layout.slices // data, layout.fsdp)}.get(axis, 1)


def _torus_link(
    size: int, taken: list[tuple[int, bool]], per_link: float, hop_seconds: float
) -> Link:
    """Returns the link of an axis that takes parts of some dims of the torus, each a ring or a
    line."""
    count, steps, exchange = 0, 0.0, math.inf
    for part, ring in taken:
        count += 2 if ring else 1
        steps += part / 2 if ring else part - 1
        # The middle of a ring of n is crossed by n / 8 of what each device holds, the middle of a
        # line by n / 4. A device keeps 1 / size, which does not leave it.
        crossing = part / (8 if ring else 4) * size / (size - 1)
        exchange = min(exchange, per_link / crossing)
    speed = per_link * max(count, 1)
    return Link(size, speed, hop_seconds * steps, min(exchange, speed), per_link)


def _wraps(chip_name: str, shape: tuple[int, ...], side: int) -> bool:
    if chip_name in _RING_OF:
        return side == _RING_OF[chip_name]
    return all(other % _CUBE == 0 for other in shape)


def _take(free: list[tuple[int, int, bool]], size: int) -> list[tuple[int, bool]]:
    """Takes parts of the free (remaining, side, wraps) dims, whole dims first. Returns each part
    with a flag that it is a ring."""
    taken = []
    while size > 1:
        options = [n for n, dim in enumerate(free) if math.gcd(dim[0], size) > 1]
        if not options:
            taken.append((size, False))
            break

        def suits(number: int, size: int = size) -> tuple[bool, bool, int]:
            left = free[number][0]
            return left == size, size % left == 0, math.gcd(left, size)

        best = max(options, key=suits)
        left, side, wraps = free[best]
        part = math.gcd(left, size)
        taken.append((part, wraps and part == side > 2))
        free[best] = (left // part, side, wraps)
        size //= part
    return taken


@functools.cache
def slice_shape(cluster: Cluster) -> tuple[int, ...]:
    """Returns the sides of one slice of a TPU cluster, in chips.

    The name may give them (`v5p:4x4x8`). Otherwise they are as near to a square or a cube as the
    factors of the number of chips allow.
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
    """Returns the prime factors in ascending order."""
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1 if factor == 2 else 2
    return factors


def _measured_links(calibration: Calibration, layout: Layout) -> dict[str, Link]:
    """Returns the link of each mesh axis.

    XLA on CPU has no native reduce-scatter: it all-reduces, and each device slices out its part.
    """
    links_by_axis: dict[str, Link] = {}
    per_host = calibration.devices // calibration.hosts
    stride = 1
    for axis in reversed(AXES):
        size = layout.size(axis)
        if size == 1:
            links_by_axis[axis] = Link(1)
            continue
        # A group of neighbours has as many members on a host as fit; a group of an outer axis has
        # fewer.
        apart = stride > 1 and stride * size > per_host
        table = calibration.across if apart else calibration.collectives
        lines = {kind: _of_size(by_size, size) for kind, by_size in table.items()}
        if calibration.platform == "cpu":
            lines["reduce_scatter"] = lines["all_reduce"]
        links_by_axis[axis] = MeasuredLink(size, lines=lines)
        stride *= size
    return links_by_axis


def _of_size(by_size: Mapping[int, Line], size: int) -> Line:
    """Returns the line of a group of `size` devices, or of the next larger measured size."""
    larger = [known for known in by_size if known >= size]
    return by_size[min(larger) if larger else max(by_size)]
