"""What a collective does to the values of the devices, and which sums count a value twice."""

import dataclasses
import re

import numpy as np

from shardlib.explain.groups import read_rows
from shardlib.explain.hlo import Instruction
from shardlib.explain.slices import permutation_of
from shardlib.explain.wrong_numbers.layout import (
    Layout,
    axes_of,
    chosen,
    dims_on,
    forget,
    is_shuffled,
    moved,
    put_together,
    taken_from,
    unknown,
)
from shardlib.explain.wrong_numbers.operations import numbers
from shardlib.explain.wrong_numbers.values import Context, Value, shapes_of
from shardlib.explain.wrong_numbers.vectors import APART, SAME

KINDS = frozenset(
    (
        *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
        *("ragged-all-to-all", "collective-broadcast"),
    )
)


@dataclasses.dataclass(frozen=True, eq=False)
class Members:
    """Who takes part in a collective with each device.

    Attributes:
        of: The members of each device's group in order, `[devices, members]`.
        rank: The place of each device among them.
    """

    of: np.ndarray
    rank: np.ndarray


def members_of(instruction: Instruction, kind: str, devices: int) -> Members | None:
    """Returns the groups of a collective by device, or None where they cannot be read."""
    rows = read_rows(instruction, kind, devices)
    if not rows or len({len(row) for row in rows}) > 1:
        return None
    if sorted(member for row in rows for member in row) != list(range(devices)):
        return None
    of, rank = np.zeros((devices, len(rows[0])), np.int64), np.zeros(devices, np.int64)
    for row in rows:
        for place, member in enumerate(row):
            of[member], rank[member] = row, place
    return Members(of, rank)


def copies_summed(value: Value, members: Members, context: Context) -> int:
    """Returns how often a sum over groups of devices counts what surely is one value; 1 if each
    summand may be another one."""
    return 1 if value.is_zero else context.once(_copies_summed, value.same, members)


def _copies_summed(same: int, members: Members, context: Context) -> int:
    classes = np.sort(context.vectors[same][members.of], axis=1)
    distinct = 1 + (np.diff(classes, axis=1) != 0).sum(axis=1)
    return int((members.of.shape[1] / distinct).max())


def result_of(
    instruction: Instruction,
    kind: str,
    value: Value,
    index: int,
    members: Members | None,
    context: Context,
) -> Value:
    """Returns what a collective makes of one of its operands.

    Args:
        instruction: The collective.
        kind: Its opcode without `-start`.
        value: The operand.
        index: Its number.
        members: Who takes part.
        context: That of the program.
    """
    if kind == "collective-permute":
        return context.once(_permuted, _pairs(instruction), value)
    shapes = shapes_of(instruction.shape)
    if kind == "all-gather" and instruction.opcode.endswith("-start"):
        shapes = shapes[len(shapes) // 2 :]
    shape = shapes[min(index, len(shapes) - 1)]
    if members is None:
        return Value(unknown(shape), APART)
    return context.once(_combined, kind, value, _along(instruction), shape, members)


def _combined(
    kind: str, value: Value, along: int, shape: tuple[int, ...], members: Members, context: Context
) -> Value:
    vectors = context.vectors
    classes = vectors[value.same][members.of]
    ranked = np.concatenate([classes, members.rank[:, None]], 1)
    if kind == "all-reduce":
        same = vectors.classes(np.sort(classes, axis=1))
        return Value(_agreed(value.layout, members, context), same, None, value.is_zero)
    if kind == "all-gather":
        parts = [taken_from(value.layout, sources, vectors) for sources in members.of.T]
        return Value(put_together(parts, along, vectors), vectors.classes(classes))
    if kind == "reduce-scatter":
        layout = _agreed(value.layout, members, context)
        start = vectors.number(members.rank * shape[along])
        layout = moved(layout, along, start, shape[along], vectors)
        return Value(layout, vectors.classes(ranked), None, value.is_zero)
    return Value(unknown(shape), vectors.classes(ranked))


def shuffled(instruction: Instruction, value: Value, members: Members, context: Context) -> int:
    """Returns the number of the offsets of parts that an all-gather puts together out of order, or
    the number of zeros."""
    return context.once(_shuffled, value.layout, _along(instruction), members)


def _shuffled(layout: Layout, along: int, members: Members, context: Context) -> int:
    parts = [taken_from(layout, sources, context.vectors) for sources in members.of.T]
    axis = is_shuffled(parts, along, context.vectors)
    return SAME if axis is None else layout.axes[axis].offsets


def _along(instruction: Instruction) -> int:
    return (numbers(instruction, "dimensions") or [0])[0]


def exchanged(values: tuple[Value, ...], members: Members, context: Context) -> tuple[Value, ...]:
    """Returns what an all-to-all of as many arrays as members gives: the n-th result is what the
    n-th member has for the device."""
    vectors = context.vectors
    classes = np.stack([vectors[value.same] for value in values])
    found = []
    for sources in members.of.T:
        layouts = [taken_from(value.layout, sources, vectors) for value in values]
        same = np.stack([classes[members.rank, sources], members.rank], 1)
        layout = chosen(layouts, members.rank, vectors)
        found.append(Value(layout, vectors.classes(same)))
    return tuple(found)


def _agreed(layout: Layout, members: Members, context: Context) -> Layout:
    """Returns the layout of a sum: what stands elsewhere on another member is given up."""
    offsets = {axis: context.vectors[layout.axes[axis].offsets] for axis in axes_of(layout)}
    differ = [axis for axis, found in offsets.items() if np.ptp(found[members.of], axis=1).any()]
    return forget(layout, layout.shape, dims_on(layout, differ)) if differ else layout


def _pairs(instruction: Instruction) -> str:
    """Returns who sends to whom in a permutation, as text."""
    return instruction.attributes.get("source_target_pairs") or permutation_of(instruction) or ""


def _permuted(pairs: str, value: Value, context: Context) -> Value:
    """A permutation that moves everyone but the first takes an array to another order of the
    axes; another shifts it, so that nothing is known of where its parts stand."""
    vectors = context.vectors
    # From whom each device receives, -1 from nobody.
    sources = np.full(vectors.devices, -1)
    for sender, receiver in re.findall(r"\{(\d+),(\d+)\}", pairs):
        if max(int(sender), int(receiver)) < vectors.devices:
            sources[int(receiver)] = int(sender)
    classes = np.where(sources < 0, -1, vectors[value.same][sources])
    same = vectors.classes(classes[:, None])
    if sources[0] != 0 or (sources < 0).any():
        return Value(unknown(value.layout.shape), same)
    return Value(taken_from(value.layout, sources, vectors), same, None, value.is_zero)
