"""Seconds of moves between layouts of a tensor, on the links of a mesh."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from shardlib.cost.machine.fabric import Link, seconds_in_turn
from shardlib.partitioner.layout import Dims

Kind = Literal["reduce_scatter", "all_reduce", "all_to_all", "all_gather", "shift"]


class Network:
    """The mesh axes that have more than one device, from the fastest to the slowest."""

    def __init__(self, links: Mapping[str, Link]):
        self.links = links
        self.axes = tuple(links)
        self.sizes = {axis: link.size for axis, link in links.items()}
        """Devices along each axis."""
        self._moves: dict[tuple, float] = {}
        self.of_edges: dict[tuple, list[list[tuple[Dims, float]]]] = {}
        """The moves of operands and results, as in `EdgeMoves.into`, which all problems on a mesh
        share."""

    def degree(self, axes: Iterable[str]) -> int:
        """Returns the product of the sizes of some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def move(
        self, num_bytes: int, have: Dims, want: Dims, pending: frozenset[str] = frozenset()
    ) -> float:
        """Returns the seconds to bring a tensor, of `num_bytes` in all, from one layout to another.
        The pieces are terms of a sum that has to be taken along the axes `pending`."""
        key = num_bytes, have, want, pending
        if key not in self._moves:
            self._moves[key] = self._move(*key)
        return self._moves[key]

    def _move(self, num_bytes: int, have: Dims, want: Dims, pending: frozenset[str]) -> float:
        steps = self.collectives(num_bytes, have, want, pending)
        return sum(self.collective(*step) for step in steps)

    def collectives(
        self, num_bytes: int, have: Dims, want: Dims, pending: frozenset[str] = frozenset()
    ) -> list[tuple[Kind, frozenset[str], float]]:
        """Returns the kind, the axes and the bytes of the collectives of a move, in order.

        Each has the bytes of the whole buffer on a device: the operand of a reduce-scatter, the
        result of an all-gather. Arguments are as in `move`.
        """
        at = {axis: dim for dim, axes in enumerate(have) for axis in axes}
        to = {axis: dim for dim, axes in enumerate(want) for axis in axes}
        scattered = frozenset(axis for axis in pending if axis in to)
        gone = frozenset(axis for axis in at if axis not in to)
        exchanged = frozenset(axis for axis in at if axis in to and at[axis] != to[axis])
        held = num_bytes / self.degree(at)
        summed = held / self.degree(scattered)
        steps: list[tuple[Kind, frozenset[str], float]] = [
            ("reduce_scatter", scattered, held),
            ("all_reduce", pending - scattered, summed),
            ("all_to_all", exchanged, summed),
            ("all_gather", gone, summed * self.degree(gone)),
        ]
        return [step for step in steps if step[1]]

    def collective(self, kind: Kind, axes: frozenset[str], num_bytes: float) -> float:
        """Returns the seconds of a collective; fast axes carry it first, slow ones what is left."""
        links = [link for axis, link in self.links.items() if axis in axes]
        return sum(seconds_in_turn(links, kind, num_bytes))


def keeps_blocks(have: Dims, want: Dims) -> bool:
    """Returns whether each device's new piece is a run of its old ones, or the other way around:
    axes that stay are major to those that come or go."""
    for old, new in zip(have, want, strict=True):
        kept = [axis in new for axis in old]
        if any(later and not now for now, later in itertools.pairwise(kept)):
            return False
    return True


def num_changes(have: Dims, want: Dims) -> int:
    """Returns the number of mesh axes that cut another dim, or none, after a move."""
    at = {axis: dim for dim, axes in enumerate(have) for axis in axes}
    to = {axis: dim for dim, axes in enumerate(want) for axis in axes}
    return sum(at.get(axis) != to.get(axis) for axis in {*at, *to})


@functools.lru_cache(maxsize=2**14)
def is_nested(have: Dims, want: Dims) -> bool:
    """Returns whether one layout only adds axes to the other."""
    pairs = [(set(a), set(b)) for a, b in zip(have, want, strict=True)]
    return all(a <= b for a, b in pairs) or all(b <= a for a, b in pairs)
