"""Live ranges of the buffers of a compiled program, from its scheduled text.

A scheduled program lists its instructions in execution order. Each one makes buffers, passes on
the buffers of its operands (tuples, loops, the halves of asynchronous operations), or writes into
them. This gives every buffer a first and a last instruction, and every instruction the bytes that
are alive at it. The body of a loop is listed once, between the instructions before and after it:
values carried by the loop are alive throughout.

Buffers share memory as in XLA's buffer assignment: in-place updates, and an elementwise result
with an operand that has no later reader. Source: `HloAliasAnalysis`,
`HloDataflowAnalysis::CanShareOperandBufferWithUser` and `HloLiveRange` of XLA. Effects of the
allocator, such as gaps between buffers, are not modelled.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from shardlib.explain.hlo.aliasing import in_place, shareable
from shardlib.explain.hlo.layouts import device_bytes
from shardlib.explain.hlo.provenance import came_from, where_of
from shardlib.explain.hlo.text import Instruction, Module, elements, parse

Value = Any
"""Result of an instruction: the number of a buffer, or a list of values for a tuple."""

_PASSED_ON = ("bitcast", "optimization-barrier", "async-update", "all-reduce-done", "domain")
_SILENT = (
    *("tuple", "get-tuple-element", "while", "conditional", "call", "parameter", "constant"),
    *_PASSED_ON,
)
"""Opcodes that neither read nor write the elements of a buffer."""


@dataclasses.dataclass
class Buffer:
    """Memory that holds one value, or several values in turn.

    Attributes:
        bytes: Size with the padding of its layout; 0 outside of device memory.
        shape: Shape and layout of its largest array, as in the program.
        name, opcode: Name and opcode of the instruction that first writes it.
        made_by: Computation and instruction of the first writer that has a source and does not
            only fill it, else of the first writer; and the number of its result.
        spans: First and last positions between which it is alive; see `LiveRanges.schedule`.
        argument: Number of the program argument that it holds, or None.
        is_output: Whether it holds a result of the program.
        writers, readers: JAX names of the instructions that write and read it.
    """

    bytes: int
    shape: str
    name: str
    opcode: str
    made_by: tuple[str, Instruction, int]
    spans: list[tuple[int, int]]
    argument: int | None = None
    is_output: bool = False
    writers: set[str] = dataclasses.field(default_factory=set)
    readers: set[str] = dataclasses.field(default_factory=set)

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def end(self) -> int:
        return self.spans[-1][1]

    def is_alive(self, position: int) -> bool:
        return any(first <= position <= last for first, last in self.spans)


@dataclasses.dataclass(frozen=True)
class LiveRanges:
    """The buffers of a program and their live ranges.

    `schedule` holds the computation and the instruction at each position, and `totals` the bytes
    alive there, arguments included.
    """

    module: Module

    buffers: tuple[Buffer, ...]
    schedule: tuple[tuple[str, Instruction], ...]
    totals: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The first position with the most bytes alive."""
        return self.totals.index(max(self.totals)) if self.totals else 0

    @property
    def peak_bytes(self) -> int:
        return max(self.totals, default=0)

    def alive(self, position: int) -> list[Buffer]:
        """Returns the buffers alive at a position, largest first."""
        buffers = [b for b in self.buffers if b.bytes and b.is_alive(position)]
        return sorted(buffers, key=lambda buffer: -buffer.bytes)

    def label(self, position: int) -> str:
        """Returns the part of the model, operation and pass at a position; see `Where.label`."""
        computation, instruction = self.schedule[position]
        where = where_of(self.module, instruction)
        if not (where.name or instruction.opcode in _SILENT):
            # An instruction that the compiler adds is named, and placed where its operands are.
            where = came_from(self.module, computation, instruction)._replace(name="")
        return where.label(instruction.name)

    def timeline(self, points: int = 400) -> tuple[tuple[str, int], ...]:
        """Returns labels and bytes over the schedule.

        The schedule is divided into at most `points` equal parts, and each part gives its position
        with the most bytes.
        """
        if not self.totals:
            return ()
        width = -(-len(self.totals) // points)
        starts = range(0, len(self.totals), width)
        ends = (min(at + width, len(self.totals)) for at in starts)
        tops = [
            max(range(a, b), key=self.totals.__getitem__) for a, b in zip(starts, ends, strict=True)
        ]
        return tuple((self.label(at), self.totals[at]) for at in tops)


def live_ranges(module: Module | str) -> LiveRanges:
    """Returns the live ranges of a scheduled program."""
    return _ScheduleWalk(parse(module) if isinstance(module, str) else module).read()


@dataclasses.dataclass
class _ScheduleWalk:
    """Walks a program in execution order."""

    module: Module
    buffers: list[Buffer] = dataclasses.field(default_factory=list)
    parent: list[int] = dataclasses.field(default_factory=list)
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """First position and last use of each value."""
    schedule: list[tuple[str, Instruction]] = dataclasses.field(default_factory=list)
    computation: str = ""
    """The computation that is run."""
    may_share: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """Position, operand and result."""

    def read(self) -> LiveRanges:
        entry = self.module.computations.get(self.module.entry, ())
        parameters = {
            i.name: self.new(i, i.shape, int(i.operands)) for i in entry if i.opcode == "parameter"
        }
        root = self.run(self.module.entry, dict(parameters))
        last = len(self.schedule) - 1
        for value in parameters.values():
            for leaf in _leaves(value):
                self.use(leaf, last)
        for leaf in _leaves(root):
            self.use(leaf, last)
            self.buffers[self.find(leaf)].is_output = True
        self._alias_arguments(root, list(parameters.values()), entry)
        self._share()
        kept = [self.buffers[n] for n in range(len(self.buffers)) if self.parent[n] == n]
        for buffer in kept:
            buffer.spans = _merged(buffer.spans)
        totals = tuple(_totals(kept, len(self.schedule)))
        return LiveRanges(self.module, tuple(kept), tuple(self.schedule), totals)

    def _alias_arguments(
        self, root: Value, arguments: list[Value], entry: tuple[Instruction, ...]
    ) -> None:
        """Joins donated arguments with the results that reuse their memory."""
        numbers = [int(i.operands) for i in entry if i.opcode == "parameter"]
        by_number = dict(zip(numbers, arguments, strict=True))
        for output, number, inner in self.module.donations():
            try:
                result, argument = root, by_number[number]
                for index in output:
                    result = result[index]
                for index in inner:
                    argument = argument[index]
            except (KeyError, IndexError, TypeError):
                continue
            self.join(argument, result)

    def run(self, computation: str, values: dict[str, Value]) -> Value:
        """Runs a computation on the values of its parameters, and returns the value of its root."""
        outer, self.computation = self.computation, computation
        for instruction in self.module.computations.get(computation, ()):
            if instruction.name not in values:
                operands = [values[name] for name in instruction.operand_names if name in values]
                values[instruction.name] = self.value(instruction, operands)
        self.computation = outer
        root = self.module.root(computation)
        return values[root.name] if root else []

    def call(self, computation: str, operands: list[Value]) -> Value:
        inner = self.module.computations.get(computation, ())
        values = {
            i.name: operands[int(i.operands)]
            for i in inner
            if i.opcode == "parameter" and int(i.operands) < len(operands)
        }
        return self.run(computation, values)

    def value(self, instruction: Instruction, operands: list[Value]) -> Value:
        """Returns the value of an instruction, and marks the use of its operands."""
        result = self._result(instruction, operands)
        position = len(self.schedule)
        silent = instruction.opcode in _SILENT
        self.schedule.append((self.computation, instruction))
        # Taking an element out of a tuple uses only that element. A loop uses its initial values
        # where it starts.
        passes = instruction.opcode in ("get-tuple-element", "while")
        for value in () if passes else operands:
            for leaf in _leaves(value):
                self.use(leaf, position)
                if not silent:
                    self.buffers[self.find(leaf)].readers.add(instruction.op_name)
        for leaf in _leaves(result):
            self.use(leaf, position)
            if not silent:
                self.buffers[self.find(leaf)].writers.add(instruction.op_name)
        return result

    def _result(self, instruction: Instruction, operands: list[Value]) -> Value:
        opcode = instruction.opcode
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element" and operands and isinstance(operands[0], list):
            return operands[0][int(instruction.attributes.get("index", 0))]
        if opcode in _PASSED_ON and operands:
            return operands[0]
        if opcode == "while" and operands:
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._branches(instruction, operands)
        if opcode == "call" and (called := instruction.called()):
            return self.call(called[0], operands)
        if opcode.endswith("-start") or opcode in ("send", "recv"):
            return self._start(instruction, operands)
        if opcode.endswith("-done") and operands and isinstance(operands[0], list):
            return self._done(instruction, operands[0])
        return self._made(instruction, operands)

    def _loop(self, instruction: Instruction, carried: Value) -> Value:
        """Returns the values of a loop, in the memory of its initial values.

        Between its last read in an iteration and the value that replaces it, a carried value is not
        alive.
        """
        position = len(self.schedule)
        root: Value = carried
        for name in ("condition", "body"):
            computation = instruction.attributes.get(name, "").lstrip("%")
            root = self.call(computation, [self._again(carried, position)])
        return self.join(root, carried)

    def _again(self, value: Value, position: int) -> Value:
        """Returns a new value in the memory of another one, alive from a position on."""
        if isinstance(value, list):
            return [self._again(part, position) for part in value]
        self.use(value, position)
        buffer = self.buffers[self.find(value)]
        self.buffers.append(dataclasses.replace(buffer, writers=set(), readers=set()))
        self.parent.append(len(self.parent))
        self.spans.append((position, position))
        return self.join(len(self.parent) - 1, value)

    def _branches(self, instruction: Instruction, operands: list[Value]) -> Value:
        branches = [name for name in instruction.called() if name in self.module.computations]
        roots = [
            self.call(branch, [operand])
            for branch, operand in zip(branches, operands[1:], strict=False)
        ]
        if not roots:
            return self.new(instruction, instruction.shape)
        for root in roots[1:]:
            self.join(roots[0], root)
        return roots[0]

    def _start(self, instruction: Instruction, operands: list[Value]) -> Value:
        """Returns the value of an asynchronous start, which carries its operands along."""
        opcode, shape = instruction.opcode, instruction.shape
        parts = elements(shape) if shape.startswith("(") else []
        if opcode == "all-reduce-start":
            return self._made(instruction, operands)
        if opcode == "recv" or not parts or not operands:
            return self.new(instruction, shape)
        if opcode == "async-start" and (called := instruction.called()):
            made = [operands, self.call(called[0], operands)]
        elif opcode == "copy-start":
            made = [self.new(instruction, parts[0]), operands[0]]
        elif opcode == "send":
            made = [operands[0]]
        else:
            # (operand, result, contexts ...): the first two are tuples if several are combined.
            made = [operands if parts[0].startswith("(") else operands[0]]
        return [*made, *(self.new(instruction, part) for part in parts[len(made) :])]

    def _done(self, instruction: Instruction, started: list[Value]) -> Value:
        if instruction.opcode in ("recv-done", "send-done"):
            kept = elements(instruction.shape) if instruction.shape.startswith("(") else ()
            return [started[0], *started[2 : 1 + len(kept)]] if kept else []
        if instruction.opcode == "copy-done" or len(started) < 2:
            return started[0] if started else []
        return started[1]

    def _made(self, instruction: Instruction, operands: list[Value]) -> Value:
        """Returns the result of an instruction, in new memory or in the memory of an operand."""
        result = self.new(instruction, instruction.shape)
        leaves = result if isinstance(result, list) else [result]
        for output, operand in in_place(self.module, instruction):
            if output < len(leaves) and operand < len(operands):
                self._join_equal(operands[operand], leaves[output])
        for operand, output in shareable(self.module, instruction, len(leaves)):
            both = operand < len(operands) and output < len(leaves)
            if both and isinstance(operands[operand], int) and isinstance(leaves[output], int):
                self.may_share.append((len(self.schedule), operands[operand], leaves[output]))
        return result

    def new(
        self, instruction: Instruction, shape: str, argument: int | None = None, output: int = 0
    ) -> Value:
        """Returns new buffers for a shape."""
        if shape.startswith("("):
            parts = enumerate(elements(shape))
            return [self.new(instruction, part, argument, output) for output, part in parts]
        constant = instruction.opcode == "constant"
        size = 0 if constant else device_bytes(shape, tiled=self.module.is_tiled)
        at = len(self.schedule)
        made_by = self.computation or self.module.entry, instruction, output
        buffer = Buffer(size, shape, instruction.name, instruction.opcode, made_by, [], argument)
        self.buffers.append(buffer)
        self.parent.append(len(self.parent))
        self.spans.append((at, at))
        return len(self.parent) - 1

    def find(self, leaf: int) -> int:
        while self.parent[leaf] != leaf:
            self.parent[leaf] = self.parent[self.parent[leaf]]
            leaf = self.parent[leaf]
        return leaf

    def use(self, leaf: int, position: int) -> None:
        first, last = self.spans[leaf]
        self.spans[leaf] = (first, max(last, position))

    def join(self, first: Value, second: Value) -> Value:
        """Puts two values into the same memory, and returns the first."""
        if isinstance(first, list) and isinstance(second, list):
            for a, b in zip(first, second, strict=False):
                self.join(a, b)
        elif isinstance(first, int) and isinstance(second, int):
            a, b = sorted((self.find(first), self.find(second)))
            if a != b:
                self.parent[b] = a
                self._absorb(self.buffers[a], self.buffers[b])
        return first

    def _join_equal(self, operand: Value, result: Value) -> None:
        both = isinstance(operand, int) and isinstance(result, int)
        if both and self.buffers[self.find(operand)].bytes == self.buffers[result].bytes:
            self.join(operand, result)

    def _absorb(self, kept: Buffer, other: Buffer) -> None:
        if other.bytes > kept.bytes:
            kept.bytes, kept.shape = other.bytes, other.shape
        kept.writers |= other.writers
        kept.readers |= other.readers
        first, then = (where_of(self.module, buffer.made_by[1]) for buffer in (kept, other))
        filled = not first.source or first.operation == "broadcast_in_dim"
        if kept.argument is None and filled and then.source:
            # A buffer that is filled with zeros comes from its first real writer.
            kept.made_by = other.made_by
        kept.argument = other.argument if kept.argument is None else kept.argument
        kept.is_output |= other.is_output

    def _share(self) -> None:
        """Lets results reuse the memory of operands without later readers, in program order."""
        for leaf, span in enumerate(self.spans):
            self.buffers[self.find(leaf)].spans.append(span)
        for position, operand, result in self.may_share:
            old, made = self.buffers[self.find(operand)], self.buffers[self.find(result)]
            if old is made or old.bytes != made.bytes or old.is_output:
                continue
            ends_here = max(last for _, last in old.spans) == position
            starts_here = min(first for first, _ in made.spans) == position
            if ends_here and starts_here and old.argument is None and made.argument is None:
                self.join(operand, result)
                old.spans.extend(made.spans)
                made.spans = old.spans


def _leaves(value: Value) -> Iterator[int]:
    if isinstance(value, list):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns spans in order, with adjacent and overlapping spans merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _totals(buffers: list[Buffer], length: int) -> Iterator[int]:
    changes = [0] * (length + 1)
    for buffer in buffers:
        for first, last in buffer.spans if length else ():
            changes[first] += buffer.bytes
            changes[last + 1] -= buffer.bytes
    total = 0
    for change in changes[:length]:
        total += change
        yield total
