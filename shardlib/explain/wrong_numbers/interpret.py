"""Abstract interpretation of a partitioned program, once for all devices, to find contradictions.

The compiler partitions one program for the devices. In a correct program, the parts that meet in an
operation are the same part of both operands, and a sum over devices adds different summands. Both
can be read from the program's text, without knowing what the partitioner intended. Each operation
gives its result a layout and the classes of devices that hold the same value. Loops are read until
nothing changes. Operations that are not understood give unknown values, which never contradict.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardlib.explain.analysis.explicit import is_explicit
from shardlib.explain.hlo.replica_groups import KINDS
from shardlib.explain.hlo.text import Instruction, Module
from shardlib.explain.wrong_numbers import arithmetic, collectives, operations
from shardlib.explain.wrong_numbers.layout import (
    APART,
    SAME,
    DimPlace,
    Side,
    Tiling,
    are_reordered,
    merged,
    pieces,
    place_of,
    unknown,
)
from shardlib.explain.wrong_numbers.operations import Shapes
from shardlib.explain.wrong_numbers.values import AnyValue, Context, SpmdValue, blank, shapes_of

_NOTHING = SpmdValue(unknown(()))
_ROUNDS = 6
"""Maximal iterations to reach a loop's fixed point. Values that still change become unknown."""
_DISTINCT = ("rng", "rng-get-and-update-state", "infeed", "recv", "recv-done", "send")
_THROUGH = frozenset(
    (
        *("async-done", "async-update", "all-gather-done", "all-reduce-done", "copy-done"),
        *("collective-permute-done", "copy-start", "optimization-barrier", "domain"),
    )
)


@dataclasses.dataclass(frozen=True)
class Contradiction:
    """A contradiction in a program.

    Attributes:
        kind: `rows` if different parts meet, `copies` if a sum counts a value several times.
        computation: Name of the instruction's computation.
        instruction: Instruction that reads the parts, or the sum.
        shape: Shape of the operand on one device.
        vectors: Ids of the vectors that show it: the offsets of the parts of each operand, or
            the classes of devices that hold the same summand.
        times: Number of times that a value is counted.
    """

    kind: str
    computation: str
    instruction: Instruction
    shape: tuple[int, ...] = ()
    vectors: tuple[int, ...] = ()
    times: int = 1


class Start(NamedTuple):
    """A dynamic slice whose start differs between devices."""

    instruction: Instruction
    dims: tuple[int, ...]
    """Dims in which the start differs."""
    is_data: bool
    """Whether the start depends on data, and not only on the device's number."""
    cuts_whole: bool
    """Whether devices with the same value take different parts of it."""


class HloReader:
    """Reads a program and collects contradictions and dynamic starts in `notes`."""

    def __init__(self, module: Module, devices: int, stands_for: Mapping[str, str] | None = None):
        self.module = module
        self.stands_for = stands_for or {}
        self.context = Context(devices)
        self.notes: list[Contradiction | Start] = []
        self._groups: dict[tuple, collectives.Members | None] = {}
        self._places: dict[tuple[Tiling, int], DimPlace | None] = {}
        self._memory: dict[tuple, tuple[AnyValue, list[Contradiction | Start]]] = {}

    def run(self, computation: str, arguments: Sequence[AnyValue]) -> AnyValue:
        """Returns the result of a computation for the given arguments."""
        computation = self.stands_for.get(computation, computation)
        key = (computation, *arguments)
        if key not in self._memory:
            before, self.notes = self.notes, []
            value = self._run(computation, arguments)
            self._memory[key] = value, self.notes
            self.notes = before
        value, notes = self._memory[key]
        self.notes += notes
        return value

    def _run(self, computation: str, arguments: Sequence[AnyValue]) -> AnyValue:
        values: dict[str, AnyValue] = {}
        shapes: dict[str, str] = {}
        value: AnyValue = ()
        for instruction in self.module.computations[computation]:
            shapes[instruction.name] = instruction.shape
            if instruction.opcode == "parameter":
                number = int(instruction.operands)
                value = arguments[number] if number < len(arguments) else blank(instruction.shape)
            else:
                operands = [values.get(name, _NOTHING) for name in instruction.operand_names]
                value = self._value(computation, instruction, operands, shapes)
            values[instruction.name] = value
            if instruction.root:
                return value
        return value

    def _value(
        self, where: str, instruction: Instruction, operands: list[AnyValue], shapes: Shapes
    ) -> AnyValue:
        opcode = instruction.opcode
        if opcode in ("fusion", "call", "async-start"):
            attributes = instruction.attributes
            name = attributes.get("calls") or attributes.get("to_apply") or ""
            return self.run(name.lstrip("%"), operands)
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return self._element(instruction, operands[0])
        if opcode in _THROUGH and operands:
            return operands[0] if len(operands) == 1 else tuple(operands)
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "conditional":
            return self._branches(instruction, operands)
        kind = opcode.removesuffix("-start")
        flat = list(_flat(operands))
        if kind in KINDS:
            return self._collective(where, instruction, kind, flat)
        return self._operation(where, instruction, flat, shapes)

    def _element(self, instruction: Instruction, value: AnyValue) -> AnyValue:
        index = int(instruction.attributes.get("index", "0"))
        if isinstance(value, SpmdValue):
            return value if index == 0 else blank(instruction.shape, value.same)
        return value[index] if index < len(value) else blank(instruction.shape)

    def _operation(
        self, where: str, instruction: Instruction, operands: list[SpmdValue], shapes: Shapes
    ) -> AnyValue:
        opcode = instruction.opcode
        if opcode == "constant":
            return self._constant(instruction)
        if opcode == "partition-id":
            return self.context.known(self.context.vectors[APART], ())
        if opcode in ("iota", "replica-id"):
            (shape,) = shapes_of(instruction.shape)
            return SpmdValue(unknown(shape), SAME, is_data=False)
        if opcode in _DISTINCT:
            return blank(instruction.shape, APART)
        value = arithmetic.computed(self.context, instruction, operands)
        if value is not None:
            return value
        same = self.context.vectors.all_of([operand.same for operand in operands])
        is_data = any(operand.is_data for operand in operands)
        if instruction.shape.startswith("("):
            return self._several(instruction, operands, same)
        if opcode == "dynamic-slice":
            self._note_start(instruction, operands)
        layout, pairs = operations.layout_of(instruction, operands, shapes, self.context)
        self._compare(where, instruction, pairs)
        return SpmdValue(layout, same, None, _is_zero(instruction, operands), is_data)

    def _several(self, instruction: Instruction, operands: list[SpmdValue], same: int) -> AnyValue:
        """Returns the results of an operation with a tuple result.

        Results of a variadic reduction or sort follow the layouts of their operands. Both results
        of a top-k follow its single operand.
        """
        is_top = instruction.attributes.get("custom_call_target") == '"TopK"'
        layouts = [unknown(shape) for shape in shapes_of(instruction.shape)]
        if is_top or instruction.opcode in ("reduce", "reduce-window", "sort", "topk"):
            for n, shape in enumerate(shapes_of(instruction.shape)):
                one = dataclasses.replace(
                    instruction,
                    opcode="sort" if is_top else instruction.opcode,
                    shape=f"f32[{','.join(map(str, shape))}]",
                )
                read = operands[:1] if len(operands) == 1 else operands[n:]
                layouts[n], _ = operations.layout_of(one, read, {}, self.context)
        return tuple(SpmdValue(layout, same) for layout in layouts)

    def _constant(self, instruction: Instruction) -> AnyValue:
        if instruction.shape.startswith("("):
            return blank(instruction.shape, SAME)
        value = arithmetic.constant(self.context, instruction)
        if value is not None:
            return value
        is_zero = instruction.operands.strip() in ("0", "-0", "false")
        (shape,) = shapes_of(instruction.shape)[:1] or [()]
        return SpmdValue(unknown(shape), SAME, None, is_zero, is_data=False)

    def _collective(
        self, where: str, instruction: Instruction, kind: str, operands: list[SpmdValue]
    ) -> AnyValue:
        members = None
        if kind != "collective-permute":
            members = self._members(instruction, kind)
        if kind in ("all-reduce", "reduce-scatter") and members and self._adds(instruction):
            for operand in operands:
                times = collectives.copies_summed(operand, members, self.context)
                if times > 1:
                    shape = operand.layout.shape
                    same = (operand.same,)
                    self._note(Contradiction("copies", where, instruction, shape, same, times))
        if kind == "all-gather" and members:
            for operand in operands:
                offsets = collectives.shuffled(instruction, operand, members, self.context)
                if offsets != SAME:
                    shape = operand.layout.shape
                    self._note(Contradiction("rows", where, instruction, shape, (offsets,)))
        if kind == "all-to-all" and members and len(operands) == members.count > 1:
            results = self.context.once(collectives.exchanged, tuple(operands), members)
        else:
            results = tuple(
                collectives.result_of(instruction, kind, operand, n, members, self.context)
                for n, operand in enumerate(operands)
            )
        if is_manual(instruction) and kind != "all-reduce":
            results = tuple(v._replace(layout=unknown(v.layout.shape)) for v in results)
        return results if len(results) > 1 or _returns_tuple(instruction, kind) else results[0]  # type: ignore[misc]

    def _members(self, instruction: Instruction, kind: str) -> collectives.Members | None:
        attributes = instruction.attributes
        marks = (name in attributes for name in ("use_global_device_ids", "channel_id"))
        key = (kind, attributes.get("replica_groups"), *marks)
        if key not in self._groups:
            devices = self.context.vectors.devices
            self._groups[key] = collectives.members_of(instruction, kind, devices)
        return self._groups[key]

    def _adds(self, instruction: Instruction) -> bool:
        name = (instruction.called() or [""])[0]
        called = self.module.computations.get(self.stands_for.get(name, name), ())
        opcodes = {one.opcode for one in called} - {"parameter", "convert", "copy", "bitcast"}
        return opcodes == {"add"}

    def _note(self, contradiction: Contradiction) -> None:
        if not is_manual(contradiction.instruction):
            self.notes.append(contradiction)

    def _note_start(self, instruction: Instruction, operands: list[SpmdValue]) -> None:
        starts = operands[1:]
        dims = tuple(n for n, start in enumerate(starts) if start.same != SAME)
        if not dims:
            return
        vectors, whole = self.context.vectors, operands[0].same
        start = vectors.all_of([start.same for start in starts])
        is_data = any(starts[dim].is_data for dim in dims)
        cuts_whole = vectors.both(whole, start) != whole
        self.notes.append(Start(instruction, dims, is_data, cuts_whole))

    def _compare(self, where: str, instruction: Instruction, pairs: operations.Pairs) -> None:
        for (one, dim), (other, at) in pairs:
            if one.axes and other.axes and (one is not other or dim != at):
                self.compare(where, instruction, (one, dim), (other, at))

    def compare(self, where: str, instruction: Instruction, one: Side, other: Side) -> None:
        """Notes a contradiction if two dims that should agree have their parts in other orders."""
        for pair in pieces(one, other):
            places = self._place(*pair[0]), self._place(*pair[1])
            if are_reordered(*places, self.context.vectors):
                offsets = tuple(place.offsets for place in places if place)
                self._note(Contradiction("rows", where, instruction, one[0].shape, offsets))

    def compare_results(
        self, computation: str, results: Sequence[AnyValue], expected: Mapping[int, AnyValue]
    ) -> None:
        """Compares the layouts of a computation's results with the expected ones, by number."""
        computation = self.stands_for.get(computation, computation)
        by_name = {one.name: one for one in self.module.computations[computation]}
        root = next(one for one in by_name.values() if one.root)
        for n, value in expected.items():
            result = results[n]
            if not isinstance(result, SpmdValue) or not isinstance(value, SpmdValue):
                continue
            if result.layout != value.layout and result.layout.shape == value.layout.shape:
                name = root.operand_names[n] if root.opcode == "tuple" else root.name
                for dim in range(len(value.layout.dims)):
                    ends = (result.layout, dim), (value.layout, dim)
                    self.compare(computation, by_name.get(name, root), *ends)

    def _place(self, layout: Tiling, dim: int) -> DimPlace | None:
        key = layout, dim
        if key not in self._places:
            self._places[key] = place_of(layout, dim, self.context.vectors)
        return self._places[key]

    def _loop(self, instruction: Instruction, start: AnyValue) -> AnyValue:
        body = instruction.attributes["body"].lstrip("%")
        carried, before = start, self.notes
        for _ in range(_ROUNDS):
            # Only the notes at the fixed point are certain.
            self.notes = []
            results = self.run(body, [carried])
            after = self.joined(carried, results)
            if after == carried:
                # The results of an iteration are the arguments of the next one.
                if not isinstance(carried, SpmdValue) and not isinstance(results, SpmdValue):
                    self.compare_results(body, results, dict(enumerate(carried)))
                break
            carried = after
        else:
            self.notes, carried = [], self.given_up(carried)
        self.notes = before + self.notes
        return _unpooled(instruction, start, carried)

    def _branches(self, instruction: Instruction, operands: list[AnyValue]) -> AnyValue:
        names = instruction.called()
        results = [
            self.run(name, [value]) for name, value in zip(names, operands[1:], strict=False)
        ]
        chosen = operands[0].same if isinstance(operands[0], SpmdValue) else APART
        joined = results[0] if results else blank(instruction.shape)
        for other in results[1:]:
            joined = self.joined(joined, other)
        return self._refined(joined, chosen)

    def joined(self, one: AnyValue, other: AnyValue) -> AnyValue:
        """Returns the value that covers either of two values."""
        if one == other:
            return one
        if not isinstance(one, SpmdValue) or not isinstance(other, SpmdValue):
            pairs = zip(one, other, strict=False)
            return tuple(self.joined(a, b) for a, b in pairs)  # type: ignore[arg-type]
        vectors = self.context.vectors
        layout = one.layout
        if one.layout.shape == other.layout.shape:
            layout = merged(one.layout, other.layout)
        same = vectors.both(one.same, other.same)
        is_zero = one.is_zero and other.is_zero
        numbers = one.numbers if one.numbers == other.numbers else None
        return SpmdValue(layout, same, numbers, is_zero, one.is_data or other.is_data)

    def given_up(self, value: AnyValue) -> AnyValue:
        """Returns an unknown value of the same shape."""
        if isinstance(value, SpmdValue):
            return SpmdValue(unknown(value.layout.shape), APART)
        return tuple(self.given_up(part) for part in value)

    def _refined(self, value: AnyValue, same: int) -> AnyValue:
        if isinstance(value, SpmdValue):
            return value._replace(same=self.context.vectors.both(value.same, same), numbers=None)
        return tuple(self._refined(part, same) for part in value)


def is_manual(instruction: Instruction) -> bool:
    """Whether an operation is an explicit collective of the user's code."""
    return is_explicit(instruction.op_name)


def _is_zero(instruction: Instruction, operands: list[SpmdValue]) -> bool:
    """Whether a result is zero wherever it is not NaN (0 times infinity, 0 / 0): a sum that counts
    it several times is right."""
    zeros = [operand.is_zero for operand in operands]
    if instruction.opcode == "divide":
        return zeros[0]
    if instruction.opcode in ("multiply", "dot", "and"):
        return any(zeros)
    if instruction.opcode == "select":
        return all(zeros[1:])
    passes = ("add", "broadcast", "bitcast", "reshape", "transpose", "copy", "convert", "slice")
    return instruction.opcode in (*passes, "negate", "concatenate", "reduce") and all(zeros)


def _unpooled(instruction: Instruction, start: AnyValue, carried: AnyValue) -> AnyValue:
    """Returns the results of a loop, which may be the gradient of a max-pool. That carries a
    counter, the result, the indices and the flat cotangent."""
    if isinstance(start, SpmdValue) or isinstance(carried, SpmdValue) or len(start) != 4:
        return carried
    if not operations.is_unpooling(instruction):
        return carried
    result, cotangent = carried[1], start[3]
    if not isinstance(result, SpmdValue) or not isinstance(cotangent, SpmdValue):
        return carried
    layout = operations.unpooled(cotangent.layout, result.layout.shape)
    return (carried[0], result._replace(layout=layout), *carried[2:])


def _returns_tuple(instruction: Instruction, kind: str) -> bool:
    return instruction.shape.startswith("(") and kind in ("all-reduce", "all-to-all")


def _flat(values: Sequence[AnyValue]) -> Iterator[SpmdValue]:
    for value in values:
        if isinstance(value, SpmdValue):
            yield value
        else:
            yield from _flat(value)
