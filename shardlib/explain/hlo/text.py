"""Parser of the text of a compiled XLA program (HLO) into computations and instructions.

It reads only what a report needs: names, opcodes, shapes, attributes as text, the call graph, loop
trip counts, and the source of an instruction. Lines that do not look like an instruction are
skipped. Attributes are parsed on demand. The grammar follows XLA's printer
(`xla/hlo/ir/hlo_instruction.cc`), of which CPU, GPU and TPU programs use different parts.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from shardlib.explain.hlo.stacks import TABLES, Stacks, field
from shardlib.explain.hlo.stacks import Frame as Frame

T = TypeVar("T")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{\s*$")
_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,<=]*)\]")
_TABLE_ROW = re.compile(r"(\d+) (?:\"(?P<text>.*)\"|\{(?P<fields>.*)\})\s*$")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"[\w.\-]+")
_OPERAND = re.compile(r"%?([\w.\-]+)$")
_PLAIN = re.compile(r"%?[\w.\-]+(?:, %?[\w.\-]+)*")
_DONATED = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_COMMENT, _NAMED = re.compile(r"/\*.*?\*/"), re.compile(r"([a-z_-]+)=")
# Fast paths for the common case: an attribute that is a word or one block, and an instruction
# without nested brackets in its shape and operands.
_SIMPLE = re.compile(
    r', ([a-z_-]+)=(\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}|[^,{}"\[\]() ]+)(?=, [a-z_-]+=|$)'
)
_COMMON = re.compile(r"([^ (]+) ([\w\-]+)\(([^()]*)\)")
_OPENING, _CLOSING = "([{", ")]}"
_NESTED, _MARKS = re.compile(r"[(\[{\"]"), re.compile(r"[()\[\]{},\"]")
_KERNEL_METADATA = re.compile(r"(kernel_metadata=\{)\n([^\n]*)\n(\})")
_COUNTS = re.compile(r"/branch_counts_([0-9_]+)/(?:cond|switch)$")
_BRACKETS = re.compile(r"[()\[\]{}]")
# Opcodes that run their computation once, as a part of themselves.
_WRAPS = ("fusion", "call", "async-start")
# Attributes that name the computations an instruction runs.
_CALLS = (
    *("calls", "to_apply", "body", "condition", "branch_computations", "called_computations"),
    *("true_computation", "false_computation"),
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `%name = shape opcode(operands), attributes`."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: Mapping[str, str]
    root: bool = False
    """Whether it is the root of its computation; the root need not be the last."""

    @functools.cached_property
    def op_name(self) -> str:
        """The JAX name of its origin, such as `jit(step)/while/body/dot_general`, or ""."""
        name = _OP_NAME.search(self.attributes.get("metadata", ""))
        return name[1].replace("\\'", "'") if name else ""

    @functools.cached_property
    def operand_names(self) -> tuple[str, ...]:
        """The names of its operands, in order; `""` for an operand without a name."""
        if _PLAIN.fullmatch(self.operands):
            return tuple(self.operands.replace("%", "").split(", "))
        ends = (_OPERAND.search(operand) for operand in split(self.operands))
        return tuple(end[1] if end else "" for end in ends)

    def called(self) -> list[str]:
        """Returns the names of the computations that it runs."""
        texts = (self.attributes.get(key, "") for key in _CALLS)
        return [name for text in texts if text for name in _CALLED.findall(text)]


@dataclasses.dataclass(frozen=True)
class Execution:
    """Execution count of a computation in one run of the program."""

    count: int
    in_loop: bool
    trips_known: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations by name, and the tables that locate its source."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    tables: Mapping[str, Mapping[int, str]]
    header: str = ""
    """The first line: `HloModule name, attributes`."""

    @functools.cached_property
    def is_tiled(self) -> bool:
        """Whether it has the tiled layouts of TPUs."""
        return ":T(" in self.header

    def each(self, *opcodes: str) -> Iterator[tuple[str, Instruction]]:
        """Yields the instructions with one of the opcodes, and their computations."""
        for computation, instructions in self.computations.items():
            for instruction in instructions:
                if instruction.opcode in opcodes:
                    yield computation, instruction

    def donations(self) -> list[tuple[tuple[int, ...], int, tuple[int, ...]]]:
        """Returns the donations: index of the result, number of the argument, index in it."""
        text = self.header.partition("input_output_alias=")[2].partition("entry_computation")[0]
        return [
            (_index(output), int(number), _index(inner))
            for output, number, inner in _DONATED.findall(text)
        ]

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[str, Instruction]]]:
        """The instructions that run each computation, with the computations that they are in."""
        callers = collections.defaultdict(list)
        for name, instructions in self.computations.items():
            for instruction in instructions:
                # The start of an asynchronous operation runs its computation. The update and the
                # end name the same computation again.
                if not instruction.opcode.endswith(("async-update", "async-done")):
                    for called in instruction.called():
                        callers[called].append((name, instruction))
        return dict(callers)

    def execution(self, computation: str) -> Execution:
        """Returns the execution count of a computation.

        Every branch of a conditional counts, unless its name says how often each is taken: in a
        scope `branch_counts_1_6_1`, for a loop of 8 trips.
        """
        return self._executions[computation]

    @functools.cached_property
    def _executions(self) -> dict[str, Execution]:
        executions: dict[str, Execution] = {}

        def visit(name: str) -> Execution:
            if name not in executions:
                count, in_loop, is_known = int(name == self.entry), False, True
                for where, instruction in self.callers.get(name, []):
                    outer = visit(where)
                    trips = self.trips(instruction) if instruction.opcode == "while" else 1
                    times = outer.count * (1 if trips is None else trips)
                    count += _taken(times, instruction, name)
                    in_loop |= outer.in_loop or instruction.opcode == "while"
                    is_known &= outer.trips_known and trips is not None
                executions[name] = Execution(count, in_loop, is_known)
            return executions[name]

        for name in self.computations:
            visit(name)
        return executions

    def trips(self, loop: Instruction) -> int | None:
        """Returns the trip count of a `while`, or None if the text does not give it.

        CPU and GPU programs carry `known_trip_count`. In TPU programs it is the only integer
        constant of the condition, which the counter is compared with.
        """
        match = re.search(
            r'"known_trip_count":\{"n":"(\d+)"', loop.attributes.get("backend_config", "")
        )
        if match:
            return int(match[1])
        condition = loop.attributes.get("condition", "").lstrip("%")
        names = [condition]
        for instruction in self.computations.get(condition, ()):
            names += instruction.called()
        bounds = {
            int(instruction.operands)
            for name in names
            for instruction in self.computations.get(name, ())
            if instruction.opcode == "constant"
            and instruction.operands.isdigit()
            and instruction.shape.startswith(("s", "u"))
        }
        return bounds.pop() if len(bounds) == 1 else None

    def origin(self, computation: str, instruction: Instruction) -> Instruction:
        """Returns the instruction if it has a JAX name, else the nearest named one it depends on.

        Instructions that the compiler adds have no name. If nothing in a fusion has a name, the
        origin of the fusion is returned.
        """
        nearest = self.sources(computation, instruction)
        if named := next((one for one in nearest if one.op_name), None):
            return named
        for where, caller in self.callers.get(computation, []):
            if caller.opcode in _WRAPS:
                return self.origin(where, caller)
        return instruction

    def sources(self, computation: str, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction and what its value comes from in its computation, nearest first."""
        by_name = self._named[computation]
        yield from _nearest(
            instruction, lambda one: [by_name[n] for n in one.operand_names if n in by_name]
        )

    def instruction(self, computation: str, name: str) -> Instruction | None:
        """Returns an instruction by its name."""
        return self._named.get(computation, {}).get(name)

    def root(self, computation: str) -> Instruction | None:
        """Returns the root of a computation, by default its last instruction."""
        instructions = self.computations.get(computation, ())
        return next((i for i in instructions if i.root), instructions[-1] if instructions else None)

    def parameter(self, computation: str, number: int) -> Instruction | None:
        """Returns a parameter of a computation by its number."""
        own = (i for i in self.computations[computation] if i.opcode == "parameter")
        return next((i for i in own if i.operands.strip() == str(number)), None)

    @functools.cached_property
    def located(self) -> dict[str, tuple[str, Instruction]]:
        """The instructions by name, with their computations."""
        pairs = self.computations.items()
        return {one.name: (where, one) for where, instructions in pairs for one in instructions}

    def operand(
        self, computation: str, instruction: Instruction, number: int
    ) -> Instruction | None:
        """Returns the instruction that makes an operand, or None if there is no such operand."""
        names = instruction.operand_names
        return self._named[computation].get(names[number]) if number < len(names) else None

    def readers(self, computation: str, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the readers of an instruction's result in its computation, nearest first."""
        nearest = _nearest(
            instruction, lambda one: [user for user, _ in self.users(computation, one.name)]
        )
        next(nearest)
        yield from nearest

    def users(self, computation: str, name: str) -> list[tuple[Instruction, int]]:
        """Returns the instructions that read a value, with its number among their operands."""
        return self._users.get((computation, name), [])

    @functools.cached_property
    def _named(self) -> dict[str, dict[str, Instruction]]:
        return {
            computation: {instruction.name: instruction for instruction in instructions}
            for computation, instructions in self.computations.items()
        }

    @functools.cached_property
    def _users(self) -> dict[tuple[str, str], list[tuple[Instruction, int]]]:
        users = collections.defaultdict(list)
        for computation, instructions in self.computations.items():
            for instruction in instructions:
                for position, name in enumerate(instruction.operand_names):
                    users[computation, name].append((instruction, position))
        return dict(users)

    def frames(self, instruction: Instruction) -> Iterator[Frame]:
        """Yields the trace stack of an instruction, innermost first.

        Nothing is yielded if the program has no stack tables.
        """
        number = field(instruction.attributes.get("metadata", ""), "stack_frame_id")
        yield from self.stacks.frames(number)

    @functools.cached_property
    def stacks(self) -> Stacks:
        """The trace stacks of its instructions."""
        return Stacks(self.tables)

    def remembered(self, name: str, make: Callable[[], T]) -> T:
        """Returns `make()`, computed once for each name, such as a table of the whole program."""
        if name not in self._memory:
            self._memory[name] = make()
        return self._memory[name]

    @functools.cached_property
    def _memory(self) -> dict[str, Any]:
        return {}

    def source(self, instruction: Instruction) -> str:
        """Returns `file:line` of the user's code, or an empty string."""
        metadata = instruction.attributes.get("metadata", "")
        file = re.search(r'source_file="([^"]*)"', metadata)
        line = re.search(r"source_line=(\d+)", metadata)
        if file:
            return f"{file[1]}:{line[1]}" if line else file[1]
        frame = next(self.frames(instruction), None)
        return f"{frame.file}:{frame.line}" if frame else ""


def parse(text: str) -> Module:
    """Returns a program parsed from its text; lines that cannot be parsed are left out."""
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in TABLES}
    entry, table = "", None
    current: list[Instruction] = []
    if "kernel_metadata={\n" in text:  # The metadata of a Pallas kernel on TPU are on own lines.
        text = _KERNEL_METADATA.sub(r"\1\2\3", text)
    for line in text.splitlines():
        if line.strip() in tables:
            table = tables[line.strip()]
        elif header := _COMPUTATION.match(line):
            table = None
            current = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif table is not None and (row := _TABLE_ROW.match(line)):
            table[int(row[1])] = row["text"] if row["text"] is not None else row["fields"]
        elif instruction := _instruction(line):
            current.append(instruction)
    frozen = {name: tuple(instructions) for name, instructions in computations.items()}
    header = text.partition("\n")[0]
    return Module(frozen, entry, tables, header if header.startswith("HloModule") else "")


def arrays(shape: str) -> list[str]:
    """Returns the arrays of a shape without layouts: `["f32[4,8]", "bf16[2]"]`."""
    return [f"{dtype}[{dims}]" for dtype, dims in _ARRAY.findall(shape)]


def dims(shape: str) -> tuple[int, ...]:
    """Returns the dims of an array, such as (4, 8) of `f32[4,8]`; () for any other text."""
    array = _ARRAY.search(shape)
    sizes = array[2].split(",") if array else ()
    return tuple(int(size.removeprefix("<=")) for size in sizes if size)


def elements(shape: str) -> list[str]:
    """Returns the shapes of the elements of a tuple, or the shape itself in a list."""
    return split(shape[1:-1]) if shape.startswith("(") else [shape]


def result_shape(instruction: Instruction) -> str:
    """Returns the shape of the result of a collective, without the operands that a start carries.

    A start returns (operand, result, contexts ...), except `all-reduce-start`, which returns only
    its results.
    """
    parts = elements(instruction.shape)
    starts = instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start"
    return parts[1] if starts and len(parts) > 1 else instruction.shape


def array_bytes(shape: str) -> int:
    """Returns the bytes of all arrays of a shape; elements below one byte are packed."""
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        bits = 8 if dtype == "pred" else int((re.search(r"\d+", dtype) or ["0"])[0])
        for dim in filter(None, dims.split(",")):
            bits *= int(dim.removeprefix("<="))
        total += (bits + 7) // 8
    return total


def split(text: str) -> list[str]:
    """Returns the parts of a text, split at commas outside of brackets and quotes."""
    if not _NESTED.search(text):
        return [part for part in map(str.strip, text.split(",")) if part]
    parts, depth, start, quoted = [], 0, 0, False
    for match in _MARKS.finditer(text):
        mark, at = match[0], match.start()
        if mark == '"' and text[at - 1 : at] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif mark in _OPENING:
            depth += 1
        elif mark in _CLOSING:
            depth -= 1
        elif mark == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in map(str.strip, (*parts, text[start:])) if part]


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    is_root = head["root"] is not None
    common = _COMMON.match(line, head.end())
    if common and "/*" not in line:
        shape, opcode, operands = common.groups()
        attributes = _Attributes(line[common.end() :].rstrip())
        return Instruction(head["name"], shape, opcode, operands, attributes, is_root)
    rest = _COMMENT.sub("", line[head.end() :])
    end = _closed(rest, 0) if rest.startswith("(") else rest.find(" ")
    opening = rest.find("(", max(end, 0))
    if end < 0 or opening < 0:
        return None
    closing = _closed(rest, opening)
    if closing < 0:
        return None
    attributes = _Attributes(rest[closing:].rstrip())
    opcode = rest[end:opening].strip()
    operands = rest[opening + 1 : closing - 1]
    return Instruction(head["name"], rest[:end], opcode, operands, attributes, is_root)


def _closed(text: str, start: int) -> int:
    """Returns the position after the bracket that closes the one at `start`, or -1."""
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        depth += 1 if bracket[0] in _OPENING else -1
        if depth == 0:
            return bracket.end()
    return -1


class _Attributes(Mapping[str, str]):
    """The attributes of an instruction, parsed only up to the requested one, as few are used."""

    __slots__ = ("_at", "_read", "_text")

    def __init__(self, text: str):
        self._text, self._at = text, 0
        self._read: dict[str, str] = {}

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self._read and f", {name}=" in self._text:
            self._read_to(name)
        return self._read.get(name, default)

    def _read_to(self, name: str) -> None:
        while simple := _SIMPLE.match(self._text, self._at):
            self._at = simple.end()
            self._read[simple[1]] = simple[2]
            if simple[1] == name:
                return
        self._read.update(_attributes(self._text[self._at :]))
        self._at = len(self._text)

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        self._read_to("")
        return iter(self._read)

    def __len__(self) -> int:
        self._read_to("")
        return len(self._read)


def _attributes(text: str) -> Iterator[tuple[str, str]]:
    """Yields attributes with their names; a part without a name continues the one before it."""
    key, value = "", ""
    for part in split(text):
        named = _NAMED.match(part)
        # `replica_groups=mesh['x'=2], device_ids=(0,1) {'x'}` is one attribute.
        if named and named[1] != "device_ids":
            if key:
                yield key, value
            key, value = named[1], part[named.end() :]
        else:
            value += f", {part}"
    if key:
        yield key, value


def _taken(times: int, instruction: Instruction, computation: str) -> int:
    """Returns how often one of the computations of an instruction runs when that runs `times`."""
    found = _COUNTS.findall(instruction.op_name) if instruction.opcode == "conditional" else ()
    if not found:
        return times
    counts = [int(count) for count in found[-1].split("_")]
    branches = instruction.called()
    if len(branches) != len(counts):
        return times
    return times * counts[branches.index(computation)] // sum(counts)


def _nearest(
    start: Instruction, neighbours: Callable[[Instruction], list[Instruction]]
) -> Iterator[Instruction]:
    """Yields instructions in order of distance, `start` first."""
    seen, waiting = {start.name}, collections.deque([start])
    while waiting:
        nearest = waiting.popleft()
        yield nearest
        for one in neighbours(nearest):
            if one.name not in seen:
                seen.add(one.name)
                waiting.append(one)


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())
