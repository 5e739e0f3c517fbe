"""Layouts of values: the part of the whole array that each device holds.

A dim of a value is a list of *factors* `(size, stride, axis)`, the major one first. Index `i` of a
factor is position `offset + i * stride` on the factor's axis. The offsets of an axis are a vector
over the devices. For example, a local `f32[4]` of 16 rows split over four devices is one factor
(4, 1, 0) whose axis has the offsets 0, 4, 8, 12 and the extent 16. The axis `UNKNOWN` marks a dim
that is unknown or constant. It agrees with every other axis.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

SAME, APART = 0, 1
"""The vectors 0, 0, 0, … and 0, 1, 2, …: as classes, all devices are alike, or all differ."""


class Vectors:
    """The vectors of a program for `devices` devices.

    A vector has two uses. As *offsets* it gives the start of each device's block. As *classes* it
    gives equal numbers to devices that hold the same value. Classes are numbered by first
    occurrence, so equal classes are equal vectors.
    """

    def __init__(self, devices: int):
        self.devices = devices
        self._numbers: dict[bytes, int] = {}
        self._vectors: list[np.ndarray] = []
        self._memory: dict[tuple, int] = {}
        self.number(np.zeros(devices, np.int64))
        self.number(np.arange(devices))

    def __getitem__(self, number: int) -> np.ndarray:
        return self._vectors[number]

    def number(self, vector: np.ndarray) -> int:
        """Returns the number that identifies a vector."""
        vector = np.ascontiguousarray(vector, np.int64)
        key = vector.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self._vectors)
            self._vectors.append(vector)
        return self._numbers[key]

    def add(self, one: int, other: int, factor: int = 1) -> int:
        """Returns the offsets `one + factor * other`."""
        key = ("add", one, other, factor)
        if key not in self._memory:
            self._memory[key] = self.number(self[one] + factor * self[other])
        return self._memory[key]

    def classes(self, rows: np.ndarray) -> int:
        """Returns the classes of devices whose rows, integers `[devices, anything]`, are equal."""
        rows = np.ascontiguousarray(rows, np.int64)
        key = ("classes", rows.tobytes())
        if key not in self._memory:
            flat = rows.reshape(len(rows), -1)
            _, firsts, kinds = np.unique(flat, axis=0, return_index=True, return_inverse=True)
            numbers = np.empty(len(firsts), np.int64)
            numbers[np.argsort(firsts)] = np.arange(len(firsts))
            self._memory[key] = self.number(numbers[kinds.reshape(-1)])
        return self._memory[key]

    def both(self, one: int, other: int) -> int:
        """Returns the classes of devices that are alike by both classes."""
        if one == other or other == SAME:
            return one
        if one == SAME:
            return other
        key = ("both", one, other)
        if key not in self._memory:
            self._memory[key] = self.classes(np.stack([self[one], self[other]], 1))
        return self._memory[key]

    def all_of(self, numbers: "list[int] | tuple[int, ...]") -> int:
        """Returns the classes of devices that are alike by all the classes."""
        joint = SAME
        for number in numbers:
            joint = self.both(joint, number)
        return joint


UNKNOWN = -1


class Factor(NamedTuple):
    """A part of a dim."""

    size: int
    stride: int = 0
    axis: int = UNKNOWN


class Axis(NamedTuple):
    """A dim of a whole array: the id of the devices' offsets, and the extent."""

    offsets: int
    extent: int


Dim = tuple[Factor, ...]


class Tiling(NamedTuple):
    """The dims of a value, and the axes of their factors."""

    dims: tuple[Dim, ...]
    axes: tuple[Axis, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one device."""
        return tuple(math.prod(factor.size for factor in dim) for dim in self.dims)


Side = tuple[Tiling, int]
"""A layout and the number of one of its dims."""


def unknown(shape: Iterable[int]) -> Tiling:
    """Returns a layout with all dims unknown."""
    return Tiling(tuple((Factor(size),) for size in shape))


def is_known(dim: Sequence[Factor]) -> bool:
    """Whether the positions of all factors of a dim are known."""
    return all(factor.axis != UNKNOWN for factor in dim)


def assembled(parts: Iterable[tuple[Tiling, Dim]]) -> Tiling:
    """Returns a layout with dims from other layouts, and with the axes of these dims."""
    numbers: dict[tuple[int, int], int] = {}
    axes: list[Axis] = []
    dims = []
    layouts: list[Tiling] = []
    for layout, dim in parts:
        source = next((n for n, one in enumerate(layouts) if one is layout), len(layouts))
        if source == len(layouts):
            layouts.append(layout)
        factors = []
        for size, stride, axis in dim:
            number = UNKNOWN
            if axis != UNKNOWN:
                if (source, axis) not in numbers:
                    numbers[source, axis] = len(axes)
                    axes.append(layout.axes[axis])
                number = numbers[source, axis]
            factors.append(Factor(size, stride, number))
        dims.append(tuple(factors))
    return Tiling(tuple(dims), tuple(axes))


def forget(layout: Tiling, shape: Sequence[int], dims: Iterable[int]) -> Tiling:
    """Returns the layout with the given shape, in which the listed dims become unknown."""
    lost = set(dims)
    return assembled(
        (layout, (Factor(size),) if n in lost else layout.dims[n]) for n, size in enumerate(shape)
    )


def reshape(layout: Tiling, shape: Sequence[int]) -> Tiling:
    """Returns the layout of the same elements, reshaped in row-major order."""
    if layout.shape == tuple(shape):
        return layout
    waiting = [factor for dim in layout.dims for factor in dim][::-1]
    dims: list[Dim] = []
    for size in shape:
        dim, left = [], size
        while waiting and (left > 1 or (not dim and waiting[-1].size == 1)):
            factor = waiting.pop()
            common = math.gcd(factor.size, left)
            if common != factor.size and common != left:
                return unknown(shape)
            if factor.size > left:
                inner = factor.size // left
                waiting.append(Factor(inner, factor.stride, factor.axis))
                factor = Factor(left, factor.stride * inner, factor.axis)
            dim.append(factor)
            left //= factor.size
        if left > 1:
            return unknown(shape)
        dims.append(_joined(dim) or (Factor(1),))
    return Tiling(tuple(dims), layout.axes)


def _joined(dim: Sequence[Factor]) -> Dim:
    """Returns a dim whose adjacent factors on one axis are merged if their strides allow it."""
    joined: list[Factor] = []
    for factor in dim:
        last = joined[-1] if joined else None
        if last and last.axis == factor.axis and last.stride == factor.stride * factor.size:
            joined[-1] = Factor(last.size * factor.size, factor.stride, factor.axis)
        elif factor.size > 1 or factor.axis != UNKNOWN:
            joined.append(factor)
    return tuple(joined)


def put_together(parts: Sequence[Tiling], dim: int, vectors: Vectors) -> Tiling:
    """Returns the layout of parts of equal shape that are concatenated along a dim.

    If the parts differ in one axis, by a constant step, they become a new major factor of the dim.
    """
    first, count = parts[0], len(parts)
    if any(part.dims != first.dims for part in parts):
        shape = [size * (count if n == dim else 1) for n, size in enumerate(first.shape)]
        return forget(first, shape, range(len(shape)))
    offsets = {
        axis: np.stack([vectors[part.axes[axis].offsets] for part in parts])
        for axis in axes_of(first)
    }
    return _in_a_row(first, count, dim, offsets)


def gathered(
    layout: Tiling, dim: int, groups: np.ndarray, own: np.ndarray, vectors: Vectors
) -> Tiling:
    """Returns the layout of the parts of a group's devices, concatenated along a dim. `groups` are
    the devices of each group in order, `[groups, members]`; `own` is the group of each device,
    `[devices]`."""
    offsets = {axis: vectors[layout.axes[axis].offsets][groups].T for axis in axes_of(layout)}
    first = taken_from(layout, groups[own, 0], vectors)
    return _in_a_row(first, groups.shape[1], dim, offsets)


def _in_a_row(first: Tiling, count: int, dim: int, offsets: dict[int, np.ndarray]) -> Tiling:
    """Returns the layout of `count` parts like the first, from their offsets by axis,
    `[parts, ...]`."""
    shape = [size * (count if n == dim else 1) for n, size in enumerate(first.shape)]
    steps = {
        axis: np.diff(found, axis=0)
        for axis, found in offsets.items()
        if np.ptp(found, axis=0).any()
    }
    step = next(iter(steps.values())) if len(steps) == 1 else np.arange(2)
    if np.ptp(step) or step.flat[0] <= 0:
        return forget(first, shape, {dim, *dims_on(first, steps)})
    (axis,), dims = steps, list(first.dims)
    dims[dim] = _joined((Factor(count, int(step.flat[0]), axis), *dims[dim]))
    return Tiling(tuple(dims), first.axes)


def is_shuffled(layout: Tiling, dim: int, groups: np.ndarray, vectors: Vectors) -> int | None:
    """Returns the axis whose parts are concatenated out of order along a dim, or None.

    The parts of the devices of a group, `[groups, members]`, cover one range of the axis without
    gaps.
    """
    factors = layout.dims[dim]
    if len(factors) != 1 or factors[0].axis == UNKNOWN:
        return None
    size, stride, axis = factors[0]
    offsets = vectors[layout.axes[axis].offsets][groups].T
    ascending = np.sort(offsets, axis=0)
    is_whole = (np.diff(ascending, axis=0) == size * stride).all()
    return axis if is_whole and not np.array_equal(ascending, offsets) else None


def taken_from(layout: Tiling, sources: np.ndarray, vectors: Vectors) -> Tiling:
    """Returns the layout after each device receives from the device in `sources` [devices]."""
    axes = (
        Axis(vectors.number(vectors[axis.offsets][sources]), axis.extent) for axis in layout.axes
    )
    return Tiling(layout.dims, tuple(axes))


def chosen(layouts: Sequence[Tiling], choice: np.ndarray, vectors: Vectors) -> Tiling:
    """Returns the layout of a value that each device picks from several values by `choice`."""
    first = layouts[0]
    if any(other.dims != first.dims for other in layouts):
        return unknown(first.shape)
    devices = np.arange(vectors.devices)
    axes = []
    for n, axis in enumerate(first.axes):
        offsets = np.stack([vectors[other.axes[n].offsets] for other in layouts])
        axes.append(Axis(vectors.number(offsets[choice, devices]), axis.extent))
    return Tiling(first.dims, tuple(axes))


def axes_of(layout: Tiling) -> list[int]:
    """Returns the numbers of the axes of all known factors."""
    return sorted({factor.axis for dim in layout.dims for factor in dim} - {UNKNOWN})


def dims_on(layout: Tiling, axes: Iterable[int]) -> set[int]:
    """Returns the dims with a factor on one of the axes."""
    lost = set(axes)
    return {n for n, dim in enumerate(layout.dims) if any(f.axis in lost for f in dim)}


def moved(layout: Tiling, dim: int, offsets: int, size: int, vectors: Vectors) -> Tiling:
    """Returns the layout of a slice of a dim: `size` elements from each device's offset."""
    factors, shape = list(layout.dims[dim]), list(layout.shape)
    shape[dim] = size
    inner, n = 1, len(factors) - 1
    while n > 0 and inner * factors[n].size <= size:
        inner, n = inner * factors[n].size, n - 1
    count, starts = size // inner, vectors[offsets] // inner
    first = starts % factors[n].size
    is_block = count * inner == size and not (vectors[offsets] % inner).any()
    is_block &= not (first + count > factors[n].size).any()
    if not is_block or not is_known(factors[: n + 1]):
        return forget(layout, shape, (dim,))
    axes, dims = list(layout.axes), list(layout.dims)
    for at in range(n, -1, -1):
        whole, stride, number = factors[at]
        axis, step = axes[number], vectors.number(starts % whole)
        axes[number] = Axis(vectors.add(axis.offsets, step, stride), axis.extent)
        factors[at] = Factor(count if at == n else 1, stride, number)
        starts = starts // whole
    elsewhere = {f.axis for n, one in enumerate(dims) if n != dim for f in one}
    # A factor of size 1 is dropped if another dim on its axis gives the position.
    left = [f for f in factors if f.size > 1 or f.axis not in elsewhere]
    dims[dim] = _joined(left) or (Factor(1),)
    return Tiling(tuple(dims), tuple(axes))


def merged(one: Tiling, other: Tiling) -> Tiling:
    """Returns the layout of two values of equal shape that are combined elementwise."""
    if not other.axes or one == other:
        return one
    if all(is_known(dim) for dim in one.dims):
        return one
    return assembled(
        (one, dim) if is_known(dim) else (other, other.dims[n]) for n, dim in enumerate(one.dims)
    )


def pieces(one: Side, other: Side) -> Iterator[tuple[Side, Side]]:
    """Yields two dims that should agree, factor by factor if one of them is partly known."""
    if _is_leading_digit(*one) or _is_leading_digit(*other):
        return
    for layout, dim in (one, other):
        sizes = [factor.size for factor in layout.dims[dim] if factor.size > 1]
        if len(sizes) > 1 and not is_known(layout.dims[dim]):
            left, right = (_cut(*side, sizes) for side in (one, other))
            for n in range(len(sizes)):
                yield (left, one[1] + n), (right, other[1] + n)
            return
    yield one, other


def _is_leading_digit(layout: Tiling, dim: int) -> bool:
    """Whether a dim holds one position of an axis whose others are in another dim.

    A reshape to the same shape, which XLA removes, would move that position to the other dim: the
    parts [1, n] of rows cut in two dims are also the parts [1, n] of a layer's own rows.
    """
    axes = {factor.axis for factor in layout.dims[dim]}
    elsewhere = {f.axis for n, d in enumerate(layout.dims) if n != dim for f in d}
    return layout.shape[dim] == 1 and bool(axes & elsewhere)


def _cut(layout: Tiling, dim: int, sizes: Sequence[int]) -> Tiling:
    return reshape(layout, (*layout.shape[:dim], *sizes, *layout.shape[dim + 1 :]))


class DimPlace(NamedTuple):
    """The position of a dim, independent of axis numbers.

    It consists of the sizes and strides of the factors, the id of the offsets, and the extent of
    the whole dim. Axes of which a device holds one position are in `single`, with extent and
    offsets, because their order among the other axes is unknown.
    """

    factors: tuple[tuple[int, int], ...]
    offsets: int
    extent: int
    single: tuple[tuple[int, int], ...] = ()


def place_of(layout: Tiling, dim: int, vectors: Vectors) -> DimPlace | None:
    """Returns the position of a dim in the dim of the whole array, or None if unknown."""
    if not is_known(layout.dims[dim]):
        return None
    factors: list[tuple[int, int]] = []
    offsets, extent = SAME, 1
    single: list[tuple[int, int]] = []
    axes = list(dict.fromkeys(factor.axis for factor in reversed(layout.dims[dim])))
    for axis in axes:
        own = [factor for factor in layout.dims[dim] if factor.axis == axis]
        low = min(factor.stride for factor in own)
        if low <= 0:
            return None
        others = [f for n, d in enumerate(layout.dims) if n != dim for f in d if f.axis == axis]
        high = min((f.stride for f in others if f.stride > low), default=layout.axes[axis].extent)
        part = vectors[layout.axes[axis].offsets] % high // low
        if len(axes) > 1 and all(factor.size == 1 for factor in own):
            single.append((max(high // low, 1), vectors.number(part)))
            continue
        offsets = vectors.number(vectors[offsets] + part * extent)
        factors = [(f.size, f.stride // low * extent) for f in own] + factors
        extent *= max(high // low, 1)
    joined: list[tuple[int, int]] = []
    for size, stride in factors:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        elif size > 1:
            joined.append((size, stride))
    return DimPlace(tuple(joined), offsets, extent, tuple(sorted(single)))


def are_reordered(one: DimPlace | None, other: DimPlace | None, vectors: Vectors) -> bool:
    """Whether both places tile the same dim with the devices' parts, in another device order."""
    if one is None or other is None or one == other or one.extent != other.extent:
        return False
    if [extent for extent, _ in one.single] != [extent for extent, _ in other.single]:
        return False
    if one[:3] == other[:3]:
        positions = (*one.single, *other.single)
        return all(len(np.unique(vectors[n])) == extent for extent, n in positions)
    return _tiles(one, vectors) and _tiles(other, vectors)


def _tiles(place: DimPlace, vectors: Vectors) -> bool:
    """Whether the devices' parts, each in ascending order, together tile a sharded dim."""
    strides = [stride for _, stride in place.factors]
    parts = len(np.unique(vectors[place.offsets]))
    size = math.prod(size for size, _ in place.factors)
    return parts > 1 and parts * size == place.extent and strides == sorted(strides, reverse=True)
