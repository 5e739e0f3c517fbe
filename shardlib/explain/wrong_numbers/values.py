"""Abstract values of a partitioned program, each on all devices at once."""

import functools
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.sharding import NamedSharding, Sharding

from shardlib.explain.hlo.replica_groups import tile_devices
from shardlib.explain.wrong_numbers.layout import (
    APART,
    SAME,
    Axis,
    Factor,
    Tiling,
    Vectors,
    unknown,
)
from shardlib.mesh import spec_axes

_Result = TypeVar("_Result")
LARGEST = 4096
"""Maximal number of integers on one device that are followed.

A table of offsets has one integer for each device.
"""
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\](?:\{([\d,]*))?")


class SpmdValue(NamedTuple):
    """An array of the program.

    Attributes:
        layout: The part of the whole array that each device holds.
        same: Classes of devices that certainly hold the same value.
        numbers: Id of the known integers that it holds, for `Context.numbers`, or None.
        is_zero: Whether all elements are zero.
        is_data: Whether it depends on the program's arguments, and not only on the device.
    """

    layout: Tiling
    same: int = SAME
    numbers: int | None = None
    is_zero: bool = False
    is_data: bool = True


AnyValue = SpmdValue | tuple["AnyValue", ...]


class Context:
    """State shared by all values of a program."""

    def __init__(self, devices: int):
        self.vectors = Vectors(devices)
        self._memory: dict[tuple, Any] = {}
        self._numbers: list[np.ndarray] = []
        self._known: dict[tuple[bytes, tuple[int, ...]], int] = {}

    def once(self, function: Callable[..., _Result], *arguments: Hashable) -> _Result:
        """Returns `function(*arguments, context)`, called once for equal arguments.

        The layers of a model repeat the same calls.
        """
        key = (function, *arguments)
        if key not in self._memory:
            self._memory[key] = function(*arguments, self)
        return self._memory[key]

    def numbers(self, value: SpmdValue) -> np.ndarray | None:
        """Returns the integers of a value, `[devices or 1, *shape]`, or None if unknown."""
        return None if value.numbers is None else self._numbers[value.numbers]

    def known(self, array: np.ndarray, shape: tuple[int, ...]) -> SpmdValue:
        """Returns the value of known integers, `[devices or 1, *shape]`."""
        array = np.ascontiguousarray(array, np.int64)
        if array.size > LARGEST * len(array):
            return SpmdValue(unknown(shape), self._classes(array), is_data=False)
        key = (array.tobytes(), array.shape)
        if key not in self._known:
            self._known[key] = len(self._numbers)
            self._numbers.append(array)
        is_zero = not array.any()
        return SpmdValue(unknown(shape), self._classes(array), self._known[key], is_zero, False)

    def _classes(self, array: np.ndarray) -> int:
        if len(array) == 1:
            return SAME
        return self.vectors.classes(array.reshape(len(array), -1))

    def offsets(self, value: SpmdValue) -> int | None:
        """Returns the id of the vector of a known scalar, one integer per device, or None."""
        array = self.numbers(value)
        if array is None or array[0].size != 1:
            return None
        return self.vectors.number(np.broadcast_to(array.reshape(-1), (self.vectors.devices,)))


@functools.cache
def shapes_of(shape: str) -> tuple[tuple[int, ...], ...]:
    """Returns the dims of each array in a shape: `(f32[4,8], s32[])` has (4, 8) and ()."""
    return tuple(_ints(dims.replace("<=", "")) for _, dims, _ in _SHAPE.findall(shape))


@functools.cache
def dims_and_order(shape: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the dims of an array, and the dim numbers in memory order, the major one first."""
    match = _SHAPE.search(shape)
    if match is None:
        return (), ()
    dims = _ints(match[2].replace("<=", ""))
    minor_to_major = _ints(match[3] or "")
    if len(minor_to_major) != len(dims):
        minor_to_major = tuple(reversed(range(len(dims))))
    return dims, minor_to_major[::-1]


def blank(shape: str, same: int = APART) -> AnyValue:
    """Returns a value of the given shape with an unknown layout."""
    values = tuple(SpmdValue(unknown(dims), same) for dims in shapes_of(shape))
    return values if shape.startswith("(") else (values or (SpmdValue(unknown(())),))[0]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of an array."""


def axes_of_sharding(sharding: Sharding | None, rank: int, mesh: Mapping[str, int]) -> Spec | None:
    """Returns the mesh axes of each dim of a `NamedSharding` on the mesh, or None for any other."""
    if not isinstance(sharding, NamedSharding):
        return None
    is_on_mesh = list(sharding.mesh.shape.items()) == list(mesh.items())
    return spec_axes(sharding.spec, rank) if is_on_mesh else None


def by_axes(
    spec: Spec, mesh: Mapping[str, int], shape: Sequence[int], context: Context
) -> SpmdValue | None:
    """Returns the value of an array with the given mesh axes, or None if they do not fit."""
    return context.once(_by_axes, spec, tuple(mesh.items()), tuple(shape))


def _by_axes(
    spec: Spec, axes: tuple[tuple[str, int], ...], shape: tuple[int, ...], context: Context
) -> SpmdValue | None:
    mesh = dict(axes)
    count = math.prod(mesh.values())
    if count != context.vectors.devices or len(spec) != len(shape):
        return None
    places = np.unravel_index(np.arange(count), tuple(mesh.values()))
    coordinates = dict(zip(mesh, places, strict=True))
    tiles = []
    for names in spec:
        tile = np.zeros(count, np.int64)
        for name in names:
            tile = tile * mesh[name] + coordinates[name]
        tiles.append(tile)
    counts = [math.prod(mesh[name] for name in names) for names in spec]
    return _value(tiles, counts, shape, context)


def by_text(text: str, shape: Sequence[int], context: Context) -> SpmdValue | None:
    """Returns the value of an array with a sharding in XLA's text form, or None if unreadable."""
    devices = context.vectors.devices
    if text.startswith("{replicated"):
        return _value([np.zeros(devices, np.int64)] * len(shape), [1] * len(shape), shape, context)
    ids = tile_devices(text) if text.startswith("{devices=") else None
    if ids is None or ids.size != devices or ids.ndim < len(shape):
        return None
    place = np.empty(devices, np.int64)
    place[ids.reshape(-1)] = np.arange(devices)
    tiles = np.unravel_index(place, ids.shape)
    return _value(tiles[: len(shape)], ids.shape[: len(shape)], shape, context)


def _value(
    tiles: Sequence[np.ndarray],
    counts: Sequence[int],
    shape: Sequence[int],
    context: Context,
) -> SpmdValue:
    vectors = context.vectors
    dims = tuple((Factor(size, 1, n),) for n, size in enumerate(shape))
    axes = tuple(
        Axis(vectors.number(tile * size), size * count)
        for tile, size, count in zip(tiles, shape, counts, strict=True)
    )
    same = vectors.classes(np.stack(tiles, 1)) if len(tiles) else 0
    return SpmdValue(Tiling(dims, axes), same)


def nothing_known(shape: Sequence[int]) -> SpmdValue:
    """Returns the value of an array with an unknown layout."""
    return SpmdValue(unknown(shape), APART)
