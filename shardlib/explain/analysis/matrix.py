"""Communication matrix of a step: the traffic between devices, or between blocks of devices."""

import dataclasses
import math

import numpy as np

from shardlib.explain.analysis.collectives import Collective, ProgramReport

_MOST_CELLS = 64
"""Largest number of rows of a matrix that fits a page."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Bytes that devices send to each other in one step.

    `sent[i, j]` is the bytes that block i sends to block j. A block is `devices_per_block`
    consecutive devices of the mesh; the diagonal holds the traffic within a block. `unplaced_bytes`
    is the traffic of collectives whose groups match no mesh axes, over all devices.
    """

    sent: np.ndarray
    devices_per_block: int
    unplaced_bytes: float


def communication_matrix(program: ProgramReport) -> Matrix:
    """Returns the communication matrix of a program, with the usual algorithm of each collective.

    An all-reduce, all-gather or reduce-scatter goes around a ring of its group, in mesh order. An
    exchange sends an equal part to every other member. A permutation goes to the next member along
    its axes. Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in
    MPICH".
    """
    count = math.prod(program.mesh.values())
    size = -(-count // _MOST_CELLS)
    blocks = -(-count // size)
    sent = np.zeros((blocks, blocks))
    unplaced = 0.0
    rings: dict[tuple[tuple[str, ...], bool], np.ndarray] = {}
    for collective in program.collectives:
        axes, between = collective.mesh_axes, collective.between_slices
        if axes is None:
            unplaced += collective.sent_bytes * count
        elif axes:
            if (axes, between) not in rings:
                rings[axes, between] = _groups(program, axes, between)
            # Members along a part of an axis are assumed to be neighbours.
            members = collective.group_size or rings[axes, between].shape[1]
            _add(sent, rings[axes, between].reshape(-1, members) // size, collective)
    return Matrix(sent, size, unplaced)


def _groups(program: ProgramReport, axes: tuple[str, ...], between_slices: bool) -> np.ndarray:
    """Returns device ids by group and position in the group: [groups, members]."""
    mesh = program.mesh
    crossed = {name: program.slices.get(name, 1) for name in mesh}
    # Each axis is split into the slices that it crosses and its devices within a slice.
    shape = [part for name in mesh for part in (crossed[name], mesh[name] // crossed[name])]
    first = 0 if between_slices else 1
    inside = [2 * at + first for at, name in enumerate(mesh) if name in axes]
    rest = [dim for dim in range(len(shape)) if dim not in inside]
    members = math.prod(shape[dim] for dim in inside)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([*rest, *inside]).reshape(-1, members)


def _add(sent: np.ndarray, blocks: np.ndarray, collective: Collective) -> None:
    """Adds one collective; `blocks` holds the block of each member: [groups, members]."""
    bytes_each, members = collective.sent_bytes, blocks.shape[1]
    if "all-to-all" not in collective.kind:
        np.add.at(sent, (blocks, np.roll(blocks, -1, axis=1)), bytes_each)
        return
    # Members of each group in each block: counting them avoids a loop over all pairs.
    held = np.zeros((blocks.shape[0], sent.shape[0]))
    np.add.at(held, (np.arange(blocks.shape[0])[:, None], blocks), 1.0)
    pairs = held.T @ held - np.diag(held.sum(axis=0))
    sent += pairs * bytes_each / max(members - 1, 1)
