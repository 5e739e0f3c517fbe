"""Clusters by name (`v5p-128`, `4x8xa100-80`), and the chip behind a JAX device."""

import dataclasses
import math
import re
from typing import Any

from shardlib.chips import CHIPS as CHIPS
from shardlib.chips import Chip as Chip
from shardlib.errors import MeshError, did_you_mean

_BY_KIND = {kind: chip for chip in CHIPS.values() for kind in chip.device_kinds}
_ALIASES = {"v5litepod": "v5e"}
# The N of v4-N and v5p-N counts TensorCores, two to a chip; that of v5e-N and v6e-N counts chips.
_CORES_PER_CHIP = {"v4": 2, "v5p": 2, "v5e": 1, "v6e": 1}
# A slice of more than one host is lent as virtual machines of 4 chips, also where a physical host
# holds 8. Source: the tables of slice shapes in the Cloud TPU pages of v5e and v6e.
_CHIPS_PER_VM = 4

_CPU = re.compile(r"cpu:(\d+)")
_TPU = re.compile(r"(?:(\d+)x)?([a-z0-9]+)(?:-(\d+)|:(\d+(?:x\d+)+))")
_GPU = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([a-z]+\d+(?:-\d+)?)")


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

    @property
    def platform(self) -> str:
        """What JAX calls the platform of the devices: `cpu`, `gpu` or `tpu`."""
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
    def network_bytes_per_second_per_device(self) -> float | None:
        """Share of one JAX device in its host's network, one direction; None if not known."""
        chip = self.chip
        if chip is None or not chip.network_bytes_per_second_per_host or not chip.chips_per_host:
            return None
        per_chip = chip.network_bytes_per_second_per_host / chip.chips_per_host
        return per_chip / chip.devices_per_chip


def chip_for(device: Any) -> Chip | None:
    """Returns the chip of a JAX device, or None if it is unknown (as every CPU is).

    `device_kind` must match exactly: an H100 on PCIe is not an H100 SXM, nor an A10G an A10.
    """
    return _BY_KIND.get(device.device_kind)


def parse_cluster(name: str) -> Cluster:
    """Reads a cluster from its name.

    `v5p-128` is one TPU slice by accelerator type (64 chips: v4 and v5p count TensorCores), and
    `v5p:4x4x4` the same by topology; `2xv5e-256` is two slices. `8xh100` is 8 GPUs of one host or,
    above what a host holds, of full hosts; `4x8xa100-80` is 4 hosts of 8. `cpu:8` is 8 CPU devices.

    Raises:
        MeshError: If the chip is unknown, or such a cluster cannot exist.
    """
    text = name.strip().lower()
    if match := _CPU.fullmatch(text):
        return Cluster(text, None, 1, _positive(name, match[1]))
    if (match := _TPU.fullmatch(text)) and _is_chip(match[2], "tpu"):
        return _tpu(text, *match.groups())
    if (match := _GPU.fullmatch(text)) and _is_chip(match[3], "gpu"):
        return _gpu(text, *match.groups())
    raise _unknown(name)


def _is_chip(name: str, kind: str) -> bool:
    chip = CHIPS.get(_ALIASES.get(name, name))
    return chip is not None and chip.kind == kind


def _positive(name: str, *counts: str | None) -> int:
    """Product of the counts, an absent one being 1."""
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
        raise MeshError(
            f"cluster {name!r} has {chips} chips in a slice, which hosts of {_CHIPS_PER_VM} chips "
            f"cannot form.\n  Choose a multiple of {_CHIPS_PER_VM} chips."
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
            f"cluster {name!r}: what the number counts is not known for {chip.full_name}.\n"
            f"  Give the topology in chips instead, as in {chip.name}:4x4x4."
        )
    if count % cores:
        raise MeshError(
            f"cluster {name!r}: {chip.name} counts TensorCores, two to a chip, so {count} is no "
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


def _unknown(name: str) -> MeshError:
    core = re.sub(r"^(\d+x)*", "", name.strip().lower())
    variants = [known for known in CHIPS if core and known.startswith(f"{core}-")]
    if core in CHIPS:
        example = f"{core}-8" if core in _CORES_PER_CHIP else f"{core}:4x4x4"
        hint = f" Add the size of the slice, as in {example}."
    elif variants:
        hint = f" Write {' or '.join(variants)}."
    else:
        # The count of a TPU slice is no part of the chip's name.
        hint = did_you_mean(core, CHIPS) or did_you_mean(re.split("[-:]", core)[0], CHIPS)
    return MeshError(
        f"cluster {name!r} is unknown.{hint}\n"
        "  Name a TPU slice (v5p-128), GPUs (8xh100; 4x8xh100 for 4 hosts) or cpu:8, with one of: "
        f"{', '.join(CHIPS)}."
    )
