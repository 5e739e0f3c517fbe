"""What the checks look at: a compiled step, and what is known of how it was made."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from shardlib.explain.ahead import CompiledStep
from shardlib.explain.hlo import Instruction, Module, array_bytes, parse
from shardlib.explain.lint.findings import Limits
from shardlib.explain.lint.shardings import spec_of_shapes, spec_of_text
from shardlib.explain.lint.values import Value, Values
from shardlib.explain.params import ParamsReport
from shardlib.explain.places import argument_path, is_library, user_source
from shardlib.explain.program import Collective, ProgramReport, read_program
from shardlib.hardware import Cluster
from shardlib.mesh import entry_axes
from shardlib.paths import path_string

DEFAULTS = Limits()
BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes of the presets that split the rows of a batch."""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array that a step takes.

    `spec` holds the mesh axes of each dim; None where the sharding is not known by axes. `donated`
    is None where that is not known. `number` is its place among the program's parameters, None
    when the program does not read it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: tuple[tuple[str, ...], ...] | None
    is_state: bool
    donated: bool | None
    number: int | None = None

    def shards(self, sizes: Mapping[str, int]) -> int:
        """Returns into how many pieces it is cut."""
        return math.prod(sizes.get(name, 1) for axes in self.spec or () for name in axes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * getattr(self.dtype, "itemsize", 4)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A compiled step. What is left out is not checked.

    Attributes:
        text: The compiled program.
        mesh: Sizes of the mesh axes, in mesh order.
        cluster: What it is compiled for.
        arguments: What it takes, as pytrees of `ShapeDtypeStruct` with shardings: the state, which
            the step updates, first.
        donated: Of each leaf of `arguments`, in order, whether it is donated.
        warnings: What the compiler wrote to stderr.
        jaxpr: The traced step.
        state: The report on the state, for its rules.
        limits: From what size on a finding is worth telling.
    """

    text: str
    mesh: Mapping[str, int]
    cluster: Cluster | None = None
    arguments: tuple[Any, ...] = ()
    donated: tuple[bool, ...] | None = None
    warnings: str = ""
    jaxpr: Any = None
    state: ParamsReport | None = None
    limits: Limits = DEFAULTS

    @classmethod
    def of(
        cls, step: CompiledStep, state: ParamsReport | None = None, limits: Limits = DEFAULTS
    ) -> "Subject":
        """Returns what is known of a step compiled ahead of time, and of its state."""
        return cls(
            step.text,
            step.mesh_sizes,
            step.cluster,
            step.arguments,
            step.donated or None,
            step.warnings,
            step.jaxpr,
            state,
            limits,
        )

    @functools.cached_property
    def module(self) -> Module:
        """The program, read."""
        return parse(self.text)

    @functools.cached_property
    def values(self) -> Values:
        """The program's values, to be traced back."""
        return Values(self.module)

    @functools.cached_property
    def program(self) -> ProgramReport:
        """The program's collectives."""
        return read_program(self.text, self.mesh)

    @functools.cached_property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: the cluster's, else the dialect's."""
        if self.cluster is not None:
            return self.cluster.platform
        if re.search(r"\]\{[\d,]*:T\(", self.text):
            return "tpu"
        return "gpu" if '"is_sync"' in self.text or "__cublas" in self.text else "cpu"

    @functools.cached_property
    def leaves(self) -> tuple[Argument, ...]:
        """The arrays that the step takes."""
        # Parameters stand in the order of arguments; those that nothing reads are left out.
        parameters = sorted(
            (int(instruction.operands), argument_path(instruction.op_name), instruction)
            for instruction in self.module.computations.get(self.module.entry, ())
            if instruction.opcode == "parameter" and instruction.operands.strip().isdigit()
        )
        found = []
        for position, argument in enumerate(self.arguments):
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
                inner, number, spec = path_string(path), None, _spec(leaf)
                name = inner or f"argument {position}"
                if parameters and inner in _inner_paths(parameters[0][1]):
                    number, name, parameter = parameters.pop(0)
                    if spec is None:
                        text = parameter.attributes.get("sharding", "")
                        here = dims(parameter.shape)
                        spec = spec_of_text(text, len(leaf.shape), self.mesh)
                        spec = spec or spec_of_shapes(tuple(leaf.shape), here, self.mesh)
                donated = self.donated[len(found)] if self.donated is not None else None
                shape, is_state = tuple(leaf.shape), position == 0
                found.append(Argument(name, shape, leaf.dtype, spec, is_state, donated, number))
        return tuple(found)

    @functools.cached_property
    def step_source(self) -> str:
        """`file:line` of the traced function, or an empty string where it is not the user's."""
        info = getattr(getattr(self.jaxpr, "jaxpr", None), "debug_info", None)
        found = re.search(r" at (.+:\d+)$", getattr(info, "func_src_info", None) or "")
        return found[1] if found and not is_library(found[1]) else ""

    @functools.cached_property
    def by_number(self) -> dict[int, Argument]:
        """The arrays by their place among the program's parameters."""
        return {leaf.number: leaf for leaf in self.leaves if leaf.number is not None}

    @functools.cached_property
    def batch(self) -> tuple[Argument, ...]:
        """The arrays whose rows are split over devices: all but the state's."""
        return tuple(leaf for leaf in self.leaves if not leaf.is_state and leaf.shape)

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of the batch; those of the presets where the batch's
        sharding is not known."""
        known = [leaf.spec for leaf in self.batch if leaf.spec]
        axes = [name for spec in known for name in spec[0]] if known else BATCH_AXES
        return tuple(name for name in self.mesh if name in axes and self.mesh[name] > 1)

    @functools.cached_property
    def collectives(self) -> tuple["Placed", ...]:
        """The collectives with where they stand."""
        where = {
            instruction.name: (computation, instruction)
            for computation, instructions in self.module.computations.items()
            for instruction in instructions
        }
        return tuple(
            Placed(collective, *where[collective.name]) for collective in self.program.collectives
        )

    def remembered(self, name: str, make: Callable[["Subject"], Any]) -> Any:
        """Returns `make(self)`, made once."""
        if name not in self._memory:
            self._memory[name] = make(self)
        return self._memory[name]

    @functools.cached_property
    def _memory(self) -> dict[str, Any]:
        return {}

    def arguments_of(self, value: Value) -> list[Argument] | None:
        """Returns the arrays that a value is made of by moves alone, or None if any is computed."""
        origins = self.values.origins(value)
        if any(origin.argument is None and origin.opcode != "constant" for origin in origins):
            return None
        numbers = [o.argument for o in origins if o.argument is not None]
        found = [self.by_number.get(number) for number in numbers]
        return [leaf for leaf in found if leaf is not None] if all(found) else None

    def place(self, placed: "Placed") -> tuple[str, str]:
        """Returns the JAX name and the source of a collective, else those of what it reads or of
        what reads it."""
        instructions = [placed.instruction]
        for value in self.values.operands(placed.computation, placed.instruction):
            if operand := self.values.instruction(value.computation, value.name):
                instructions.append(operand)
        users = self.values.users(placed.computation, placed.instruction.name)
        for user, _ in users:
            instructions.append(user)
            instructions += [one for one, _ in self.values.users(placed.computation, user.name)]
        return self._first(instructions)

    def _first(self, instructions: list[Instruction]) -> tuple[str, str]:
        # An argument is named by its path and has no source: what reads it tells more.
        names = [(i.op_name, user_source(self.module, i)) for i in instructions]
        return next((pair for pair in names if pair[1]), names[0])


@dataclasses.dataclass(frozen=True)
class Placed:
    """A collective and its instruction."""

    collective: Collective
    computation: str
    instruction: Instruction

    @property
    def bytes(self) -> int:
        """Bytes of its buffer in one execution."""
        return self.collective.bytes


def largest(shapes: tuple[str, ...]) -> str:
    """Returns the largest of some arrays, such as `bf16[8,512]`, and how many more there are."""
    first = max(shapes, key=array_bytes, default="")
    return first if len(shapes) < 2 else f"{first} and {len(shapes) - 1} more"


def array_text(array: Any) -> str:
    """Returns shape and dtype of an array as `float32[4,8]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def dims(shape: str) -> tuple[int, ...]:
    """Returns the dims of one array's shape."""
    inside = shape[shape.index("[") + 1 : shape.index("]")]
    return tuple(int(dim.removeprefix("<=")) for dim in inside.split(",") if dim)


def each(subject: Subject, opcodes: tuple[str, ...]) -> Iterator[tuple[str, Instruction]]:
    """Yields the instructions of some opcodes with the computations that they stand in."""
    for computation, instructions in subject.module.computations.items():
        for instruction in instructions:
            if instruction.opcode in opcodes:
                yield computation, instruction


def _inner_paths(path: str) -> tuple[str, str]:
    """The path inside of an argument, were it a named one, or one of a variable number."""
    _, _, inner = path.partition("/")
    return inner, inner.partition("/")[2] if inner.split("/")[0].isdigit() else inner


def _spec(leaf: Any) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes of each dim of an array."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None)
    if spec is None:
        return None
    entries = [entry_axes(entry) for entry in spec]
    return (*entries, *[()] * (len(leaf.shape) - len(entries)))
