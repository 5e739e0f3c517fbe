"""Traffic between TPU slices over the data-centre network.

The text of a multi-slice program is the program of one slice: its groups number the devices of a
slice. Traffic between slices consists of pairs of `send` and `recv`, whose `frontend_attributes`
name the collective that they are part of (`_xla_megascale_transfer_type`).
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np
from jax.sharding import Mesh

from shardlib.explain.hlo.text import Instruction, Module, elements
from shardlib.hardware import slice_of

_TYPES = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "COLLECTIVE_PERMUTE": "collective-permute",
}


@dataclasses.dataclass(frozen=True)
class Slices:
    """Division of the axes of a mesh into slices."""

    count: int
    outer: Mapping[str, int]
    """Number of slices that each axis crosses."""
    inner: Mapping[str, int]
    """Number of devices of each axis within a slice."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cross slices, in mesh order."""
        return tuple(name for name, degree in self.outer.items() if degree > 1)


def slices_of(mesh: object, sizes: Mapping[str, int], module: Module) -> Slices:
    """Returns the division of a mesh into the slices of a program.

    If the mesh has no devices to read it from, the leading axes cross slices, as in `make_mesh`.
    """
    partitions = re.search(r"num_partitions=(\d+)", module.header)
    total = math.prod(sizes.values())
    here = int(partitions[1]) if partitions else total
    count = total // here if here and total % here == 0 else 1
    outer = dict.fromkeys(sizes, 1)
    if count > 1 and isinstance(mesh, Mesh):
        outer = _crossed(mesh)
    if count > 1 and math.prod(outer.values()) != count:
        left = count
        for name, size in sizes.items():
            outer[name] = math.gcd(size, left)
            left //= outer[name]
    return Slices(count, outer, {name: size // outer[name] for name, size in sizes.items()})


def _crossed(mesh: Mesh) -> dict[str, int]:
    slices = np.vectorize(slice_of, otypes=[int])(mesh.devices)
    crossed = {}
    for dim, name in enumerate(mesh.axis_names):
        lines = np.moveaxis(slices, dim, -1).reshape(-1, slices.shape[dim])
        crossed[name] = max(len(set(line.tolist())) for line in lines)
    return crossed


def received_shapes(module: Module) -> dict[str, str]:
    """Returns the shape that each rendezvous between slices receives on one device."""
    return {
        rendezvous: elements(instruction.shape)[0]
        for _, instruction in module.each("recv")
        if (rendezvous := rendezvous_of(instruction))
    }


def rendezvous_of(instruction: Instruction) -> str:
    """Returns the name that a `send` shares with its `recv`, or ""."""
    return _frontend(instruction, "_xla_host_transfer_rendezvous")


def transfer_kind(instruction: Instruction) -> str | None:
    """Returns the kind of the collective between slices that a `send` or `recv` is part of."""
    return _TYPES.get(_frontend(instruction, "_xla_megascale_transfer_type"))


def permutation_of(instruction: Instruction) -> str | None:
    """Returns the senders and receivers that a `send` or `recv` of a GPU program names."""
    return _frontend(instruction, "_xla_send_recv_source_target_pairs") or None


def _frontend(instruction: Instruction, name: str) -> str:
    text = instruction.attributes.get("frontend_attributes", "")
    value = re.search(rf'{name}="([^"]*)"', text)
    return value[1] if value else ""
