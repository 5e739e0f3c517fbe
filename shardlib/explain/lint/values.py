"""Origins of values in a compiled program, through fusions, calls, tuples and loops."""

import collections
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from shardlib.explain.hlo.text import Instruction, Module

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


class Value(NamedTuple):
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

    @functools.cached_property
    def _by_name(self) -> dict[tuple[str, str], Instruction]:
        return {
            (where, instruction.name): instruction
            for where, instructions in self.module.computations.items()
            for instruction in instructions
        }

    @functools.cached_property
    def _parameters(self) -> dict[tuple[str, int], str]:
        return {
            (where, int(instruction.operands)): name
            for (where, name), instruction in self._by_name.items()
            if instruction.opcode == "parameter" and instruction.operands.strip().isdigit()
        }

    @functools.cached_property
    def _users(self) -> dict[tuple[str, str], list[tuple[Instruction, int]]]:
        found = collections.defaultdict(list)
        for (where, _), instruction in self._by_name.items():
            for position, name in enumerate(instruction.operand_names):
                found[where, name].append((instruction, position))
        return dict(found)

    def users(self, computation: str, name: str) -> list[tuple[Instruction, int]]:
        """Returns the instructions that read a value, and the operand index in each."""
        return self._users.get((computation, name), [])

    def instruction(self, computation: str, name: str) -> Instruction | None:
        """Returns an instruction by its name."""
        return self._by_name.get((computation, name))

    def operands(self, computation: str, instruction: Instruction) -> list[Value]:
        """Returns the operands of an instruction as values."""
        return [Value(computation, name) for name in instruction.operand_names]

    def parameter(self, computation: str, number: int) -> str | None:
        """Returns the name of a computation's parameter."""
        return self._parameters.get((computation, number))

    def root(self, computation: str) -> Instruction | None:
        """Returns the root instruction of a computation."""
        instructions = self.module.computations.get(computation, ())
        marked = (instruction for instruction in instructions if instruction.root)
        return next(marked, instructions[-1] if instructions else None)

    def origins(self, value: Value) -> frozenset[Origin]:
        """Returns the origins of a value, traced back only through moves."""
        if value not in self._known:
            self._known[value] = self._origins(value)
        return self._known[value]

    @functools.cached_property
    def _known(self) -> dict[Value, frozenset[Origin]]:
        return {}

    def _origins(self, value: Value) -> frozenset[Origin]:
        found: set[Origin] = set()
        seen: set[Value] = set()
        pending = [value]
        while pending:
            at = pending.pop()
            if at in seen:
                continue
            seen.add(at)
            instruction = self._by_name.get((at.computation, at.name))
            if instruction is None:
                found.add(Origin(None, "unknown"))
            elif instruction.opcode == "parameter" and at.computation == self.module.entry:
                found.add(Origin(int(instruction.operands), "parameter"))
            else:
                before = list(self.before(at, instruction))
                pending += before
                if not before:
                    found.add(Origin(None, instruction.opcode))
        return frozenset(found)

    def before(self, at: Value, instruction: Instruction) -> Iterator[Value]:
        """Yields the values that a value is moved from, or nothing if it is computed."""
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
            if root := self.root(body):
                yield Value(body, root.name, at.index)
        elif opcode == "fusion" or opcode in _CALLS:
            for called in instruction.called()[:1]:
                if root := self.root(called):
                    yield Value(called, root.name, at.index)
        elif opcode in MOVES:
            yield from operands[:1] if opcode in _FIRST_ONLY else operands

    def _passed(self, at: Value, number: int) -> Iterator[Value]:
        """Yields the values that callers of a computation pass for one of its parameters."""
        for where, caller in self.module.callers.get(at.computation, []):
            operands = self.operands(where, caller)
            if caller.opcode == "while":
                yield operands[0]._replace(index=at.index)
                root = self.root(at.computation)
                if root and caller.attributes["body"].lstrip("%") == at.computation:
                    yield Value(at.computation, root.name, at.index)
            elif number < len(operands) and caller.opcode in ("fusion", *_CALLS):
                yield operands[number]._replace(index=at.index)

    def unchanged(self, loop: Instruction) -> frozenset[int]:
        """Returns the elements of a loop's carry that no iteration changes."""
        body = loop.attributes["body"].lstrip("%")
        root = self.root(body)
        count = len(root.operand_names) if root and root.opcode == "tuple" else 0
        return frozenset(index for index in range(count) if self._handed_on(body, index) == index)

    def _handed_on(self, body: str, index: int) -> int | None:
        """Returns the element of the body's parameter that equals an element of its result."""
        root = self.root(body)
        assert root is not None
        at = Value(body, root.name, index)
        while instruction := self._by_name.get((body, at.name)):
            if instruction.opcode == "parameter":
                return at.index
            inside = self._element(at, instruction)
            if inside is None:
                return None
            at = inside
        return None

    def _element(self, at: Value, instruction: Instruction) -> Value | None:
        """Returns the value behind one tuple or copy in the same computation, or None."""
        names = instruction.operand_names
        if instruction.opcode == "get-tuple-element":
            return Value(at.computation, names[0], int(instruction.attributes["index"]))
        if instruction.opcode == "tuple" and at.index is not None:
            return Value(at.computation, names[at.index])
        if instruction.opcode in ("copy", "bitcast", "optimization-barrier"):
            return Value(at.computation, names[0], at.index)
        return None

    def is_invariant(self, body: str, kept: frozenset[int], value: Value) -> bool:
        """Whether a value in the body of a loop is the same in every iteration.

        Args:
            body: The computation of the body.
            kept: The elements of its carry that no iteration changes.
            value: A value of the body.
        """
        seen: set[Value] = set()
        pending = [value]
        while pending:
            at = pending.pop()
            if at in seen:
                continue
            seen.add(at)
            instruction = self._by_name.get((body, at.name))
            if instruction is not None and instruction.opcode == "parameter":
                if at.index not in kept:
                    return False
                continue
            if instruction is None or instruction.opcode in _EFFECTS:
                return False
            inside = self._element(at, instruction)
            operands = [inside] if inside else self.operands(body, instruction)
            if not operands and instruction.opcode not in _FRESH:
                return False
            pending += operands
        return True
