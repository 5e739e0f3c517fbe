"""Who sends how much to whom: the traffic of a step between devices, or between blocks of them."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from shardlib.explain.program import Collective, ProgramReport

_MOST_CELLS = 64
"""Rows of a matrix that a page can still show."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Bytes that devices send to each other in one step.

    `sent[i, j]` is what block i sends to block j; a block is `devices_per_block` devices that
    follow each other in the mesh, and what they send among themselves stands on the diagonal.
    `unplaced_bytes` are sent by collectives whose groups are no mesh axes, over all devices.
    """

    sent: np.ndarray
    devices_per_block: int
    unplaced_bytes: float


def communication_matrix(program: ProgramReport) -> Matrix:
    """Returns the traffic of a program, each collective by its usual algorithm.

    An all-reduce, all-gather or reduce-scatter goes around a ring of its group, in mesh order; an
    exchange sends an equal part to every other member; a permutation goes to the next one along
    its axes. Source: Thakur et al. 2005, "Optimization of Collective Communication Operations in
    MPICH".
    """
    count = math.prod(program.mesh.values())
    size = -(-count // _MOST_CELLS)
    blocks = -(-count // size)
    sent = np.zeros((blocks, blocks))
    unplaced = 0.0
    rings: dict[tuple[str, ...], np.ndarray] = {}
    for collective in program.collectives:
        axes = collective.mesh_axes
        if axes is None:
            unplaced += collective.sent_bytes * count
        elif axes:
            if axes not in rings:
                rings[axes] = _groups(program.mesh, axes)
            # Those along a part of an axis are taken to be neighbours.
            members = collective.group_size or rings[axes].shape[1]
            _add(sent, rings[axes].reshape(-1, members) // size, collective)
    return Matrix(sent, size, unplaced)


def _groups(mesh: Mapping[str, int], axes: tuple[str, ...]) -> np.ndarray:
    """Devices by group and position in it: [groups, members]."""
    names = list(mesh)
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    inside = [names.index(name) for name in axes]
    rest = [dim for dim in range(len(names)) if dim not in inside]
    members = math.prod(mesh[name] for name in axes)
    return ids.transpose([*rest, *inside]).reshape(-1, members)


def _add(sent: np.ndarray, blocks: np.ndarray, collective: Collective) -> None:
    """Adds one collective; `blocks` holds the block of each member: [groups, members]."""
    bytes_each, members = collective.sent_bytes, blocks.shape[1]
    if "all-to-all" not in collective.kind:
        np.add.at(sent, (blocks, np.roll(blocks, -1, axis=1)), bytes_each)
        return
    # How many members of each group stand in each block, so that no pair is visited by itself.
    held = np.zeros((blocks.shape[0], sent.shape[0]))
    np.add.at(held, (np.arange(blocks.shape[0])[:, None], blocks), 1.0)
    pairs = held.T @ held - np.diag(held.sum(axis=0))
    sent += pairs * bytes_each / max(members - 1, 1)
