"""Uses of the results of all-reduces: results that are only sliced, or only added up.

XLA for accelerators turns an all-reduce of which each device keeps a part into a reduce-scatter,
and a sum of all-reduces into an all-reduce of sums. XLA for CPU does neither. This module finds
both patterns in CPU programs, so that their traffic can be compared.

Source: XLA's passes `ReduceScatterCreator` and `AllReduceReassociate`.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

from shardlib.explain.hlo.text import Instruction, Module, dims, elements

Fate = Literal["whole", "sliced", "added"]
"""Use of one array that an all-reduce returns. `whole`: it is used as it is. `sliced`: each device
uses only its part. `added`: it is added to other all-reduces, and another array of the sum counts
for all."""

# Operations that keep the values and their number.
_CARRIED = ("bitcast", "copy", "convert", "reshape", "transpose")

Value = tuple[str, str]  # computation, instruction


@dataclasses.dataclass(frozen=True)
class ValueUses:
    """The uses of values, through fusions."""

    module: Module

    def uses(self, value: Value) -> Iterator[tuple[str, Instruction]]:
        """Yields the instructions that read a value, with their computations.

        Operations that only carry the value on, and fusion boundaries, are passed through.
        """
        computation, _ = value
        for instruction, position in self.module.users(*value):
            if instruction.opcode in _CARRIED:
                yield from self.uses((computation, instruction.name))
            elif instruction.opcode == "fusion":
                called = instruction.attributes["calls"].lstrip("%")
                if parameter := self.module.parameter(called, position):
                    yield from self.uses((called, parameter.name))
            else:
                yield computation, instruction
        root = self.module.root(computation)
        if root is not None and root.name == value[1]:
            for where, caller in self.module.callers.get(computation, []):
                if caller.opcode == "fusion":
                    yield from self.uses((where, caller.name))
                else:
                    yield where, caller

    def results(self, computation: str, instruction: Instruction) -> list[list[Value]]:
        """Returns the values that stand for each array that an instruction returns."""
        shapes = elements(instruction.shape)
        if len(shapes) == 1 and not instruction.shape.startswith("("):
            return [[(computation, instruction.name)]]
        values: list[list[Value]] = [[] for _ in shapes]
        for user, _ in self.module.users(computation, instruction.name):
            if user.opcode == "get-tuple-element":
                values[int(user.attributes["index"])].append((computation, user.name))
        return values


def fates(
    module: Module, all_reduces: list[tuple[str, Instruction, int]]
) -> dict[tuple[str, str], tuple[Fate, ...]]:
    """Returns the fate of each array that all-reduces return, by computation and name. They are
    given by computation, instruction and group size, and all have the same groups, since only these
    can be added up before they are reduced."""
    flow = ValueUses(module)
    fates_of: dict[tuple[str, str], list[Fate]] = {}
    pending: list[_Sum] = []
    for computation, instruction, devices in all_reduces:
        results = flow.results(computation, instruction)
        fates_of[computation, instruction.name] = ["whole"] * len(results)
        for index, values in enumerate(results):
            shape = elements(instruction.shape)[index]
            uses = [use for value in values for use in flow.uses(value)]
            where = (computation, instruction.name, index)
            pending.append(_Sum([where], math.prod(dims(shape)) // max(devices, 1), uses))
    for total in _added_up(flow, pending):
        computation, name, index = total.members[0]
        if total.uses and all(_is_part(use, total.part) for _, use in total.uses):
            fates_of[computation, name][index] = "sliced"
        for computation, name, index in total.members[1:]:
            fates_of[computation, name][index] = "added"
    return {key: tuple(value) for key, value in fates_of.items()}


@dataclasses.dataclass
class _Sum:
    """All-reduced arrays that are added up, the element count of a device's part, and the uses."""

    members: list[tuple[str, str, int]]
    part: int
    uses: list[tuple[str, Instruction]]


def _added_up(flow: ValueUses, sums: list[_Sum]) -> list[_Sum]:
    """Joins pairs that are used only in the same additions, until no such pair is left.

    A pair may have several additions: a fusion repeats one if that is cheaper than storing its
    result.
    """
    while True:
        by_additions: dict[frozenset[Value], list[_Sum]] = collections.defaultdict(list)
        for total in sums:
            if total.uses and all(use.opcode == "add" for _, use in total.uses):
                additions = frozenset((where, use.name) for where, use in total.uses)
                by_additions[additions].append(total)
        pairs = [(at, pair) for at, pair in by_additions.items() if len(pair) == 2]
        if not pairs:
            return sums
        for additions, (left, right) in pairs:
            sums = [total for total in sums if total is not left and total is not right]
            uses = [use for addition in additions for use in flow.uses(addition)]
            sums.append(_Sum(left.members + right.members, left.part, uses))


def _is_part(use: Instruction, part: int) -> bool:
    return use.opcode == "dynamic-slice" and math.prod(dims(use.shape)) == part
