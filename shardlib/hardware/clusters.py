"""Clusters by name (`v5p-128`, `4x8xa100-80`, `4xgb200-nvl72`, `8xh100+16xa100-80`), and the chip
of a JAX device."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from shardlib.errors import MeshError, did_you_mean
from shardlib.hardware.chips import CHIPS, Chip

_BY_KIND = {kind: chip for chip in CHIPS.values() for kind in chip.device_kinds}
_ALIASES = {"v5litepod": "v5e"}
# The N of v3-N, v4-N and v5p-N counts TensorCores, two per chip; that of v5e-N and v6e-N chips.
_CORES_PER_CHIP = {"v3": 2, "v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}
# A slice of more than one host consists of virtual machines with 4 chips, even if a physical host
# holds 8. Source: the tables of slice shapes in the Cloud TPU pages of v5e and v6e.
_CHIPS_PER_VM = 4

_CPU = re.compile(r"cpu:(\d+)")
_TPU = re.compile(r"(?:(\d+)x)?([a-z0-9]+)(?:-(\d+)|:(\d+(?:x\d+)+))")
_GPU = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([a-z]+\d+(?:-\d+)?)")
_RACKS = re.compile(r"(?:(\d+)x)?([a-z]+\d+)-nvl(\d+)")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of one kind on hosts, possibly in several slices."""

    name: str
    chip: Chip | None
    """None for CPU devices."""
    num_hosts: int
    devices_per_host: int
    """JAX devices that one process sees."""
    num_slices: int = 1
    """TPU slices, each with its own torus; GPU nodes are hosts of one slice."""
    num_racks: int | None = None
    """Racks whose hosts NVLink joins, for chips with such racks; None for as few as hold the
    hosts in equal parts."""

    @property
    def platform(self) -> str:
        """JAX's name for the platform of the devices: `cpu`, `gpu` or `tpu`."""
        return "cpu" if self.chip is None else self.chip.kind

    @property
    def num_devices(self) -> int:
        """JAX devices in all."""
        return self.num_hosts * self.devices_per_host

    @property
    def num_chips(self) -> int:
        """Chips in all; CPU devices count as one each."""
        return self.num_devices // (self.chip.devices_per_chip if self.chip else 1)

    @property
    def devices_per_domain(self) -> int:
        """JAX devices that are connected without a network: all of a rack that NVLink joins, all
        of a TPU slice, otherwise the GPUs of a host that NVLink or PCIe joins."""
        chip = self.chip
        if chip is None or chip.kind == "tpu":
            return self.num_devices // self.num_slices
        if not chip.nvlink_bytes_per_second:
            return self.devices_per_host
        if chip.nvlink_chips <= (chip.chips_per_host or chip.nvlink_chips):
            return min(self.devices_per_host, chip.nvlink_chips)
        racks = self.num_racks or -(-self.num_devices // chip.nvlink_chips)
        while self.num_hosts % racks:
            racks += 1
        return self.num_devices // racks

    @property
    def network_bytes_per_second_per_device(self) -> float | None:
        """Share of one JAX device in its host's network, one direction; None if not known."""
        chip = self.chip
        if chip is None:
            return None
        per_chip = chip.network_bytes_per_second_per_chip
        if chip.network_bytes_per_second_per_host and chip.chips_per_host:
            per_chip = chip.network_bytes_per_second_per_host / chip.chips_per_host
        return None if per_chip is None else per_chip / chip.devices_per_chip


@dataclasses.dataclass(frozen=True)
class MixedCluster:
    """GPUs of several kinds whose hosts share a network; only the planner accepts such a cluster.

    Raises:
        MeshError: If one program cannot run on all of them.
    """

    kinds: tuple[Cluster, ...]
    """Clusters of one kind of chip each, in the order in which their processes are started."""

    def __post_init__(self) -> None:
        if fault := _mixing_fault(self):
            raise MeshError(f"cluster {self.name!r} {fault}")

    @property
    def name(self) -> str:
        """The joined names of the parts."""
        return "+".join(kind.name for kind in self.kinds)

    @property
    def num_devices(self) -> int:
        """JAX devices in all."""
        return sum(kind.num_devices for kind in self.kinds)

    @property
    def num_chips(self) -> int:
        """Chips in all."""
        return sum(kind.num_chips for kind in self.kinds)

    @property
    def num_hosts(self) -> int:
        """Hosts in all."""
        return sum(kind.num_hosts for kind in self.kinds)


def chip_for(device: Any) -> Chip | None:
    """Returns the chip of a JAX device, or None if it is unknown, like every CPU.

    `device_kind` must match exactly: an H100 on PCIe is not an H100 SXM, nor an A10G an A10.
    """
    return _BY_KIND.get(device.device_kind)


def slice_of(device: Any) -> int:
    """Returns the index of a device's slice (TPU) or fast-link domain (GPU); 0 without one."""
    return getattr(device, "slice_index", 0) or 0


def cluster_of(devices: Sequence[Any]) -> Cluster | None:
    """Returns the cluster formed by devices; None if their chip is unknown."""
    chip = chip_for(devices[0])
    if chip is None or any(chip_for(device) != chip for device in devices):
        return None
    slices = len({slice_of(device) for device in devices})
    hosts = len({device.process_index for device in devices})
    if len(devices) % hosts or len(devices) % slices:
        return None
    return Cluster(f"{len(devices)}x{chip.name}", chip, hosts, len(devices) // hosts, slices)


def parse_cluster(name: str) -> Cluster:
    """Returns a cluster from its name.

    `v5p-128` is one TPU slice by accelerator type (64 chips: v4 and v5p count TensorCores), and
    `v5p:4x4x4` is the same by topology; `2xv5e-256` is two slices. `8xh100` is 8 GPUs of one host;
    larger counts fill whole hosts. `4x8xa100-80` is 4 hosts of 8. `4xgb200-nvl72` is 4 racks whose
    72 GPUs each are joined by NVLink; `4xgb200-nvl64` uses 64 of each. `cpu:8` is 8 CPU devices.

    Raises:
        MeshError: If the chip is unknown, or the cluster cannot exist or is mixed.
    """
    text = name.strip().lower()
    if is_mixed(text):
        raise MeshError(
            f"cluster {name!r} has several kinds of chips, which only plan supports.\n"
            f"  Name one of them, as in {text.split('+')[0]}; for all: shardlib plan --on {text}"
        )
    if match := _CPU.fullmatch(text):
        return Cluster(text, None, 1, _positive(name, match[1]))
    if (match := _TPU.fullmatch(text)) and _is_chip(match[2], "tpu"):
        return _tpu(text, *match.groups())
    if (match := _GPU.fullmatch(text)) and _is_chip(match[3], "gpu"):
        return _gpu(text, *match.groups())
    if (match := _RACKS.fullmatch(text)) and _is_chip(match[2], "gpu"):
        return _racks(text, *match.groups())
    raise _unknown(name)


def of_one_kind(on: "str | Cluster | MixedCluster") -> Cluster:
    """Returns a cluster from its name, or unchanged.

    Raises:
        MeshError: If the cluster is unknown or mixed.
    """
    if isinstance(on, Cluster):
        return on
    return parse_cluster(on if isinstance(on, str) else on.name)


def is_mixed(name: str) -> bool:
    """Whether a name joins several clusters, as in `8xh100+16xa100-80`."""
    return "+" in name


def parse_mixed(name: str) -> MixedCluster:
    """Returns a mixed cluster from the names of its parts, as in `8xh100+16xa100-80`.

    Raises:
        MeshError: If a part is unknown or absent, or one program cannot run on all of them.
    """
    parts = [part.strip() for part in name.split("+")]
    if not all(parts):
        raise MeshError(
            f"cluster {name!r} lacks a part next to a '+'.\n  Write it as in 8xh100+16xa100-80."
        )
    return MixedCluster(tuple(parse_cluster(part) for part in parts))


def _mixing_fault(mixed: MixedCluster) -> str | None:
    """Returns why no program can run on all parts of a cluster, or None.

    All devices of a JAX program have the same platform, and all slices of a job have the same
    accelerator type. Source: Google, "Cloud TPU Multislice overview", on the accelerator type.
    """
    chips = [(kind, kind.chip.name) for kind in mixed.kinds if kind.chip is not None]
    names = [name for _, name in chips]
    twice = sorted({name for name in names if names.count(name) > 1})
    platforms = {kind.platform for kind in mixed.kinds}
    sizes = sorted({kind.devices_per_host for kind in mixed.kinds})
    example = "as in 8xh100+16xa100-80"
    if len(mixed.kinds) < 2:
        return f"has only one part.\n  Join several, {example}."
    if "cpu" in platforms:
        return f"has CPU devices, which cannot be mixed.\n  Mix GPUs, {example}."
    if len(platforms) > 1:
        return (
            "mixes TPUs and GPUs, but a JAX program runs on one platform.\n"
            f"  Plan for each alone, or mix GPUs, {example}."
        )
    if twice:
        return f"names {' and '.join(twice)} more than once.\n  Write each kind once, {example}."
    if "tpu" in platforms:
        return (
            "mixes generations of TPUs, but all slices of a job must have the same one.\n"
            f"  Plan for each alone, or mix GPUs, {example}."
        )
    if len(sizes) > 1:
        have = (f"{kind.devices_per_host} {name}" for kind, name in chips)
        same = (f"{kind.num_hosts}x{sizes[0]}x{name}" for kind, name in chips)
        return (
            f"has hosts of {' and of '.join(have)}, but a mesh needs the same number per host.\n"
            f"  Use the same number, as in {'+'.join(same)}."
        )
    return None


def _is_chip(name: str, kind: str) -> bool:
    chip = CHIPS.get(_ALIASES.get(name, name))
    return chip is not None and chip.kind == kind


def _positive(name: str, *counts: str | None) -> int:
    """Returns the product of the counts; an absent count is 1."""
    product = math.prod(int(count) for count in counts if count is not None)
    if product == 0:
        raise MeshError(f"cluster {name!r} has no devices.\n  Write counts of at least 1.")
    return product


def _tpu(name: str, slices: str | None, chip_name: str, count: str, topology: str) -> Cluster:
    chip = CHIPS[_ALIASES.get(chip_name, chip_name)]
    num_slices = _positive(name, slices)
    if topology:
        chips = _positive(name, *topology.split("x"))
    else:
        chips = _chips_of_type(name, chip, _positive(name, count))
    per_host = chip.chips_per_host or 1
    if chips > (chip.max_chips or chips):
        raise MeshError(
            f"cluster {name!r} has {chips} chips in a slice, but the largest {chip.full_name} "
            f"slice has {chip.max_chips}.\n  Join several slices, as in 2x{chip.name}-..."
        )
    if chips > per_host and chips % _CHIPS_PER_VM:
        cores = _CORES_PER_CHIP.get(chip.name, 1)
        fewer = chips // _CHIPS_PER_VM * _CHIPS_PER_VM
        near = (f"{chip.name}-{n * cores}" for n in (fewer, fewer + _CHIPS_PER_VM))
        example = "" if topology else f", as in {' or '.join(near)}"
        raise MeshError(
            f"cluster {name!r} has {chips} chips in a slice, but its hosts have {_CHIPS_PER_VM} "
            f"each.\n  Choose a multiple of {_CHIPS_PER_VM} chips{example}."
        )
    chips_here = chips if chips <= per_host else _CHIPS_PER_VM
    return Cluster(
        name,
        chip,
        num_hosts=num_slices * chips // chips_here,
        devices_per_host=chips_here * chip.devices_per_chip,
        num_slices=num_slices,
    )


def _chips_of_type(name: str, chip: Chip, count: int) -> int:
    cores = _CORES_PER_CHIP.get(chip.name)
    if cores is None:
        raise MeshError(
            f"cluster {name!r}: the unit of the number is unknown for {chip.full_name}.\n"
            f"  Give the topology in chips instead, as in {chip.name}:4x4x4."
        )
    if count % cores:
        raise MeshError(
            f"cluster {name!r}: {chip.name} counts TensorCores, two per chip, so {count} is not a "
            f"whole number of chips.\n  Write {chip.name}-{count * cores} for {count} chips."
        )
    return count // cores


def _gpu(name: str, first: str | None, second: str | None, chip_name: str) -> Cluster:
    chip = CHIPS[chip_name]
    most = chip.chips_per_host
    if second is None:
        total = _positive(name, first)
        per_host = min(total, most) if most else total
        hosts, left = divmod(total, per_host)
    else:
        hosts, per_host, left = _positive(name, first), _positive(name, second), 0
    if left or (most and per_host > most):
        raise MeshError(
            f"cluster {name!r}: a host holds up to {most} {chip.full_name}.\n"
            f"  Write hosts x GPUs of each, as in 2x{most}x{chip.name}."
        )
    return Cluster(name, chip, num_hosts=hosts, devices_per_host=per_host)


def _racks(name: str, count: str | None, chip_name: str, per_rack: str) -> Cluster:
    chip = CHIPS[chip_name]
    racks, gpus = _positive(name, count), _positive(name, per_rack)
    per_host = chip.chips_per_host or 1
    if chip.nvlink_chips <= per_host:
        raise MeshError(
            f"cluster {name!r}: NVLink does not join hosts of {chip.full_name}.\n"
            f"  Write hosts x GPUs of each, as in 2x{per_host}x{chip.name}."
        )
    if gpus > chip.nvlink_chips or gpus % per_host:
        raise MeshError(
            f"cluster {name!r}: a rack holds up to {chip.nvlink_chips} {chip.name} in hosts of "
            f"{per_host}.\n  Write the GPUs used of each rack, as in 4x{chip.name}-nvl64."
        )
    return Cluster(name, chip, racks * gpus // per_host, per_host, num_racks=racks)


def _unknown(name: str) -> MeshError:
    text = name.strip().lower()
    core = re.sub(r"^(\d+x)*", "", text)
    variants = [known for known in CHIPS if core and known.startswith(f"{core}-")]
    if core in CHIPS:
        example = f"{core}-8" if core in _CORES_PER_CHIP else f"{core}:4x4x4"
        hint = f" Add the size of the slice, as in {example}."
    elif re.match(r"(\d+x)?cpus?\b|cpu\d", text):
        hint = " Write cpu and the number of devices, as in cpu:8."
    elif variants:
        hint = f" Write {' or '.join(variants)}."
    elif match := re.fullmatch(rf"(\d+x)?({'|'.join(_CORES_PER_CHIP)})([1-9]\d*)", text):
        hint = f" Did you mean '{match[1] or ''}{match[2]}-{match[3]}'?"
    else:
        # The count of a TPU slice does not belong to the chip's name.
        hint = did_you_mean(core, CHIPS) or did_you_mean(re.split("[-:]", core)[0], CHIPS)
    return MeshError(
        f"cluster {name!r} is unknown.{hint}\n"
        "  Name a TPU slice (v5p-128), GPUs (8xh100; 4x8xh100 for 4 hosts) or cpu:8, with one of: "
        f"{', '.join(CHIPS)}."
    )
