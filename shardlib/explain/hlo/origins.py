"""Origins of values in a compiled program, through fusions, calls, tuples and loops."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from shardlib.explain.hlo.text import Instruction, Module

_Node = TypeVar("_Node", bound=Hashable)
# Operations that rearrange, split or join values, and compute nothing.
MOVES = frozenset(
    (
        *("bitcast", "copy", "convert", "reshape", "transpose", "broadcast", "slice", "reverse"),
        *("dynamic-slice", "optimization-barrier", "copy-start", "copy-done", "all-gather"),
        *("all-gather-start", "all-gather-done", "collective-permute", "bitcast-convert", "pad"),
        *("collective-permute-start", "collective-permute-done", "concatenate", "all-to-all"),
    )
)
_FIRST_ONLY = ("dynamic-slice", "pad")
"""Moves whose first operand is the value. The other operands are positions or padding."""
_CALLS = ("call", "async-start", "async-update", "async-done")
_FRESH = ("constant", "iota", "partition-id", "replica-id", "after-all")
_EFFECTS = ("rng", "rng-get-and-update-state", "infeed", "recv", "send", "recv-done")


def reached(start: Iterable[_Node], onward: Callable[[_Node], Iterable[_Node]]) -> Iterator[_Node]:
    """Yields the given nodes and all nodes that `onward` leads to, each once."""
    pending, seen = list(start), set()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += onward(node)


class HloValue(NamedTuple):
    """The result of an instruction in a computation, or one element of it."""

    computation: str
    name: str
    index: int | None = None


class Origin(NamedTuple):
    """The origin of a value: an argument of the program by its number, else an operation."""

    argument: int | None
    opcode: str


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a program, which can be traced back to their origins."""

    module: Module

    def operands(self, computation: str, instruction: Instruction) -> list[HloValue]:
        """Returns the operands of an instruction as values."""
        return [HloValue(computation, name) for name in instruction.operand_names]

    def origins(self, value: HloValue) -> frozenset[Origin]:
        """Returns the origins of a value, traced back only through moves."""
        if value not in self._origins:
            at_ends = map(self._origin, reached([value], self.before))
            self._origins[value] = frozenset(origin for origin in at_ends if origin is not None)
        return self._origins[value]

    @functools.cached_property
    def _origins(self) -> dict[HloValue, frozenset[Origin]]:
        return {}

    def _origin(self, at: HloValue) -> Origin | None:
        """Returns where a value is computed or passed to the program, or None if it is moved."""
        instruction = self.module.instruction(at.computation, at.name)
        if instruction is None:
            return Origin(None, "unknown")
        if self._is_argument(at, instruction):
            return Origin(int(instruction.operands), "parameter")
        is_moved = next(iter(self.before(at)), None) is not None
        return None if is_moved else Origin(None, instruction.opcode)

    def _is_argument(self, at: HloValue, instruction: Instruction) -> bool:
        return instruction.opcode == "parameter" and at.computation == self.module.entry

    def before(self, at: HloValue) -> Iterator[HloValue]:
        """Yields the values that a value is moved from, or nothing if it is computed."""
        instruction = self.module.instruction(at.computation, at.name)
        if instruction is None or self._is_argument(at, instruction):
            return
        where, opcode = at.computation, instruction.opcode
        operands = self.operands(where, instruction)
        if opcode == "get-tuple-element":
            yield operands[0]._replace(index=int(instruction.attributes["index"]))
        elif opcode == "tuple":
            yield from operands if at.index is None else operands[at.index : at.index + 1]
        elif opcode == "parameter":
            yield from self._passed(at, int(instruction.operands))
        elif opcode == "while":
            yield operands[0]._replace(index=at.index)
            body = instruction.attributes["body"].lstrip("%")
            if root := self.module.root(body):
                yield HloValue(body, root.name, at.index)
        elif opcode == "fusion" or opcode in _CALLS:
            for called in instruction.called()[:1]:
                if root := self.module.root(called):
                    yield HloValue(called, root.name, at.index)
        elif opcode in MOVES:
            yield from operands[:1] if opcode in _FIRST_ONLY else operands

    def _passed(self, at: HloValue, number: int) -> Iterator[HloValue]:
        """Yields the values that callers of a computation pass for one of its parameters."""
        for where, caller in self.module.callers.get(at.computation, []):
            operands = self.operands(where, caller)
            if caller.opcode == "while":
                yield operands[0]._replace(index=at.index)
                root = self.module.root(at.computation)
                if root and caller.attributes["body"].lstrip("%") == at.computation:
                    yield HloValue(at.computation, root.name, at.index)
            elif number < len(operands) and caller.opcode in ("fusion", *_CALLS):
                yield operands[number]._replace(index=at.index)

    def unchanged(self, loop: Instruction) -> frozenset[int]:
        """Returns the elements of a loop's carry that no iteration changes."""
        body = loop.attributes["body"].lstrip("%")
        root = self.module.root(body)
        if root is None or root.opcode != "tuple":
            return frozenset()
        elements = [HloValue(body, root.name, n) for n in range(len(root.operand_names))]
        return frozenset(n for n, value in enumerate(elements) if self._handed_on(value) == n)

    def _handed_on(self, at: HloValue) -> int | None:
        """Returns the element of the body's parameter that equals a value of the body."""
        while instruction := self.module.instruction(at.computation, at.name):
            if instruction.opcode == "parameter":
                return at.index
            inside = self._element(at, instruction)
            if inside is None:
                return None
            at = inside
        return None

    def _element(self, at: HloValue, instruction: Instruction) -> HloValue | None:
        """Returns the value behind one tuple or copy in the same computation, or None."""
        names = instruction.operand_names
        if instruction.opcode == "get-tuple-element":
            return HloValue(at.computation, names[0], int(instruction.attributes["index"]))
        if instruction.opcode == "tuple" and at.index is not None:
            return HloValue(at.computation, names[at.index])
        if instruction.opcode in ("copy", "bitcast", "optimization-barrier"):
            return HloValue(at.computation, names[0], at.index)
        return None

    def is_invariant(self, kept: frozenset[int], value: HloValue) -> bool:
        """Whether a value in the body of a loop is the same in every iteration. `kept` are the
        elements of the body's carry that no iteration changes."""

        def operands(at: HloValue) -> list[HloValue]:
            instruction = self.module.instruction(at.computation, at.name)
            if instruction is None or instruction.opcode == "parameter":
                return []
            inside = self._element(at, instruction)
            return [inside] if inside else self.operands(at.computation, instruction)

        for at in reached([value], operands):
            instruction = self.module.instruction(at.computation, at.name)
            if instruction is None or instruction.opcode in _EFFECTS:
                return False
            if instruction.opcode == "parameter":
                if at.index not in kept:
                    return False
            elif not operands(at) and instruction.opcode not in _FRESH:
                return False
        return True
