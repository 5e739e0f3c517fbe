"""Vectors with one integer per device, stored once and identified by a number.

A program of thousands of values has few different vectors, so each operation on two of them is
done once and cached.
"""

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
        """Returns the classes of devices whose rows are equal.

        Args:
            rows: Integers, `[devices, anything]`.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        key = ("classes", rows.tobytes())
        if key not in self._memory:
            order: dict[bytes, int] = {}
            found = [order.setdefault(row.tobytes(), len(order)) for row in rows]
            self._memory[key] = self.number(np.array(found))
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
        found = SAME
        for number in numbers:
            found = self.both(found, number)
        return found
