"""Abstract values of a partitioned program, each on all devices at once."""

import functools
import re
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from shardlib.explain.wrong_numbers.layout import Layout, unknown
from shardlib.explain.wrong_numbers.vectors import APART, SAME, Vectors

_Result = TypeVar("_Result")
LARGEST = 4096
"""Maximal number of integers on one device that are followed.

A table of offsets has one integer for each device.
"""
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\](?:\{([\d,]*))?")


class Value(NamedTuple):
    """An array of the program.

    Attributes:
        layout: The part of the whole array that each device holds.
        same: Classes of devices that certainly hold the same value.
        numbers: Id of the known integers that it holds, for `Context.numbers`, or None.
        is_zero: Whether all elements are zero.
        is_data: Whether it depends on the program's arguments, and not only on the device.
    """

    layout: Layout
    same: int = SAME
    numbers: int | None = None
    is_zero: bool = False
    is_data: bool = True


AnyValue = Value | tuple["AnyValue", ...]


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

    def numbers(self, value: Value) -> np.ndarray | None:
        """Returns the integers of a value, `[devices or 1, *shape]`, or None if unknown."""
        return None if value.numbers is None else self._numbers[value.numbers]

    def known(self, array: np.ndarray, shape: tuple[int, ...]) -> Value:
        """Returns the value of known integers, `[devices or 1, *shape]`."""
        array = np.ascontiguousarray(array, np.int64)
        if array.size > LARGEST * len(array):
            return Value(unknown(shape), self._classes(array), is_data=False)
        key = (array.tobytes(), array.shape)
        if key not in self._known:
            self._known[key] = len(self._numbers)
            self._numbers.append(array)
        is_zero = not array.any()
        return Value(unknown(shape), self._classes(array), self._known[key], is_zero, False)

    def _classes(self, array: np.ndarray) -> int:
        if len(array) == 1:
            return SAME
        return self.vectors.classes(array.reshape(len(array), -1))

    def offsets(self, value: Value) -> int | None:
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
    found = _SHAPE.search(shape)
    if found is None:
        return (), ()
    dims = _ints(found[2].replace("<=", ""))
    minor_to_major = _ints(found[3] or "")
    if len(minor_to_major) != len(dims):
        minor_to_major = tuple(reversed(range(len(dims))))
    return dims, minor_to_major[::-1]


def blank(shape: str, same: int = APART) -> AnyValue:
    """Returns a value of the given shape with an unknown layout."""
    found = tuple(Value(unknown(dims), same) for dims in shapes_of(shape))
    return found if shape.startswith("(") else (found or (Value(unknown(())),))[0]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
