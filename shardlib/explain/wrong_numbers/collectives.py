"""Effects of collectives on values, and the sums that count a value more than once."""

import dataclasses
import re

import numpy as np

from shardlib.explain.hlo.replica_groups import read_rows
from shardlib.explain.hlo.slices import permutation_of
from shardlib.explain.hlo.text import Instruction
from shardlib.explain.wrong_numbers.layout import (
    APART,
    SAME,
    Tiling,
    axes_of,
    chosen,
    dims_on,
    forget,
    gathered,
    is_shuffled,
    moved,
    taken_from,
    unknown,
)
from shardlib.explain.wrong_numbers.operations import numbers
from shardlib.explain.wrong_numbers.values import Context, SpmdValue, shapes_of


@dataclasses.dataclass(frozen=True, eq=False)
class Members:
    """The members of the groups of a collective.

    Attributes:
        groups: Members of each group in order, `[groups, members]`.
        own: The group of each device.
        rank: Index of each device in its group.
    """

    groups: np.ndarray
    own: np.ndarray
    rank: np.ndarray

    @property
    def count(self) -> int:
        """Members of a group."""
        return self.groups.shape[1]

    def kinds(self, rows: np.ndarray) -> np.ndarray:
        """Returns equal numbers for devices whose groups have equal rows, from `[groups, n]`."""
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)[self.own]


def members_of(instruction: Instruction, kind: str, devices: int) -> Members | None:
    """Returns the groups of a collective by device, or None if they cannot be read."""
    rows = read_rows(instruction, kind, devices)
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    if sorted(member for row in rows for member in row) != list(range(devices)):
        return None
    groups = np.array(rows, np.int64)
    own, rank = np.zeros((2, devices), np.int64)
    own[groups], rank[groups] = np.indices(groups.shape)
    return Members(groups, own, rank)


def copies_summed(value: SpmdValue, members: Members, context: Context) -> int:
    """Returns how often a sum over groups of devices counts the same value.

    The result is 1 if all summands may differ.
    """
    return 1 if value.is_zero else context.once(_copies_summed, value.same, members)


def _copies_summed(same: int, members: Members, context: Context) -> int:
    classes = np.sort(context.vectors[same][members.groups], axis=1)
    distinct = 1 + (np.diff(classes, axis=1) != 0).sum(axis=1)
    return int((members.count / distinct).max())


def result_of(
    instruction: Instruction,
    kind: str,
    value: SpmdValue,
    index: int,
    members: Members | None,
    context: Context,
) -> SpmdValue:
    """Returns the result of a collective for one of its operands."""
    if kind == "collective-permute":
        return context.once(_permuted, _pairs(instruction), value)
    shapes = shapes_of(instruction.shape)
    if kind == "all-gather" and instruction.opcode.endswith("-start"):
        shapes = shapes[len(shapes) // 2 :]
    shape = shapes[min(index, len(shapes) - 1)]
    if members is None:
        return SpmdValue(unknown(shape), APART)
    return context.once(_combined, kind, value, _along(instruction), shape, members)


def _combined(
    kind: str,
    value: SpmdValue,
    along: int,
    shape: tuple[int, ...],
    members: Members,
    context: Context,
) -> SpmdValue:
    vectors = context.vectors
    classes = vectors[value.same][members.groups]
    if kind == "all-reduce":
        same = vectors.classes(members.kinds(np.sort(classes, axis=1)))
        return SpmdValue(_agreed(value.layout, members, context), same, None, value.is_zero)
    if kind == "all-gather":
        layout = gathered(value.layout, along, members.groups, members.own, vectors)
        return SpmdValue(layout, vectors.classes(members.kinds(classes)))
    ranked = np.stack([members.kinds(classes), members.rank], axis=1)
    if kind == "reduce-scatter":
        layout = _agreed(value.layout, members, context)
        start = vectors.number(members.rank * shape[along])
        layout = moved(layout, along, start, shape[along], vectors)
        return SpmdValue(layout, vectors.classes(ranked), None, value.is_zero)
    return SpmdValue(unknown(shape), vectors.classes(ranked))


def shuffled(instruction: Instruction, value: SpmdValue, members: Members, context: Context) -> int:
    """Returns the id of the offsets of parts that an all-gather concatenates out of order, or the
    id of the zeros."""
    return context.once(_shuffled, value.layout, _along(instruction), members)


def _shuffled(layout: Tiling, along: int, members: Members, context: Context) -> int:
    axis = is_shuffled(layout, along, members.groups, context.vectors)
    return SAME if axis is None else layout.axes[axis].offsets


def _along(instruction: Instruction) -> int:
    return (numbers(instruction, "dimensions") or [0])[0]


def exchanged(
    values: tuple[SpmdValue, ...], members: Members, context: Context
) -> tuple[SpmdValue, ...]:
    """Returns the results of an all-to-all with as many arrays as members.

    The n-th result is the array that the n-th member has for the device.
    """
    vectors = context.vectors
    classes = np.stack([vectors[value.same] for value in values])
    results = []
    for place in range(members.count):
        sources = members.groups[members.own, place]
        layouts = [taken_from(value.layout, sources, vectors) for value in values]
        same = np.stack([classes[members.rank, sources], members.rank], 1)
        layout = chosen(layouts, members.rank, vectors)
        results.append(SpmdValue(layout, vectors.classes(same)))
    return tuple(results)


def _agreed(layout: Tiling, members: Members, context: Context) -> Tiling:
    """Returns the layout of a sum. Dims whose offsets differ between members become unknown."""
    offsets = {axis: context.vectors[layout.axes[axis].offsets] for axis in axes_of(layout)}
    differ = [
        axis for axis, found in offsets.items() if np.ptp(found[members.groups], axis=1).any()
    ]
    return forget(layout, layout.shape, dims_on(layout, differ)) if differ else layout


def _pairs(instruction: Instruction) -> str:
    """Returns the source-target pairs of a permutation as text."""
    return instruction.attributes.get("source_target_pairs") or permutation_of(instruction) or ""


def _permuted(pairs: str, value: SpmdValue, context: Context) -> SpmdValue:
    """Returns the result of a permutation.

    A permutation of all devices that keeps the first one reorders the mesh axes. Any other is a
    shift, and its layout is unknown.
    """
    vectors = context.vectors
    # The device that each device receives from, or -1.
    sources = np.full(vectors.devices, -1)
    for sender, receiver in re.findall(r"\{(\d+),(\d+)\}", pairs):
        if max(int(sender), int(receiver)) < vectors.devices:
            sources[int(receiver)] = int(sender)
    classes = np.where(sources < 0, -1, vectors[value.same][sources])
    same = vectors.classes(classes[:, None])
    if sources[0] != 0 or (sources < 0).any():
        return SpmdValue(unknown(value.layout.shape), same)
    return SpmdValue(taken_from(value.layout, sources, vectors), same, None, value.is_zero)
