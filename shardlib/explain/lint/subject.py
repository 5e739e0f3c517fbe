"""What the checks look at: a compiled step, and what is known of how it was made."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardlib.explain.ahead import CompiledStep, argument_names
from shardlib.explain.equations import equations
from shardlib.explain.hlo import Instruction, Module, array_bytes, parse
from shardlib.explain.lint.arguments import Argument, read_arguments
from shardlib.explain.lint.findings import Limits
from shardlib.explain.lint.values import Value, Values
from shardlib.explain.params import ParamsReport
from shardlib.explain.places import Where, asks, is_library, outermost_source, where_of
from shardlib.explain.program import Collective, ProgramReport, read_program
from shardlib.hardware import Cluster
from shardlib.mesh import STANDARD_AXES

DEFAULTS = Limits()
BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes of the presets that split the rows of a batch."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A compiled step. What is left out is not checked.

    Attributes:
        text: The compiled program.
        mesh: Sizes of the mesh axes, in mesh order.
        cluster: What it is compiled for.
        arguments: What it takes, as pytrees of `ShapeDtypeStruct` with shardings.
        names: What each array of them is for, by its path, as in `CompiledStep.argument_names`.
        donated: Of each leaf of `arguments`, in order, whether it is donated.
        warnings: What the compiler wrote to stderr.
        jaxpr: The traced step.
        state: The report on the state, for its rules.
        limits: From what size on a finding is worth telling.
        module: The program, read from `text`.
        program: Its collectives.
    """

    text: str
    mesh: Mapping[str, int]
    cluster: Cluster | None = None
    arguments: tuple[Any, ...] = ()
    names: Mapping[str, str] | None = None
    donated: tuple[bool, ...] | None = None
    warnings: str = ""
    jaxpr: Any = None
    state: ParamsReport | None = None
    limits: Limits = DEFAULTS
    module: Module = None  # type: ignore[assignment]
    program: ProgramReport = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.module is None:
            object.__setattr__(self, "module", parse(self.text))
        if self.program is None:
            object.__setattr__(self, "program", read_program(self.module, self.mesh))

    @classmethod
    def of(
        cls,
        step: CompiledStep,
        state: ParamsReport | None = None,
        limits: Limits = DEFAULTS,
        *,
        module: Module | None = None,
        program: ProgramReport | None = None,
    ) -> "Subject":
        """Returns what is known of a step compiled ahead of time, and of its state.

        Args:
            step: The step.
            state: The report on its state.
            limits: From what size on a finding is worth telling.
            module: The step's text, where it is parsed already.
            program: Its collectives, where they are read already.
        """
        module = module or parse(step.text)
        return cls(
            step.text,
            step.mesh_sizes,
            step.cluster,
            step.arguments,
            step.argument_names,
            step.donated or None,
            step.warnings or "",
            step.jaxpr,
            state,
            limits,
            module,
            program or read_program(module, step.mesh),
        )

    @functools.cached_property
    def values(self) -> Values:
        """The program's values, to be traced back."""
        return Values(self.module)

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
        names = self.names
        if names is None:
            names = argument_names(
                self.arguments, tuple(f"argument/{n}" for n in range(len(self.arguments)))
            )
        return read_arguments(self.arguments, names, self.donated, self.module, self.mesh)

    @functools.cached_property
    def step_source(self) -> str:
        """`file:line` of the traced function, else of a line of it that computes; an empty string
        where it is not the user's."""
        info = getattr(getattr(self.jaxpr, "jaxpr", None), "debug_info", None)
        found = re.search(r" at (.+:\d+)$", getattr(info, "func_src_info", None) or "")
        source = found[1] if found else ""
        if not asks(source):
            return "" if is_library(source) else source
        # A step that was moved to another mesh is another function that computes the same.
        placed = equations(self.jaxpr)
        return next(filter(None, (outermost_source(p.equation) for p in placed)), "")

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
        """The mesh axes that split the rows of the batch; those of the presets where its sharding
        is not known, or where nothing splits them."""
        axes = {name for leaf in self.batch if leaf.spec for name in leaf.spec[0]} or BATCH_AXES
        return tuple(name for name in self.mesh if name in axes and self.mesh[name] > 1)

    @functools.cached_property
    def own_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device whose names the presets do not know."""
        return tuple(n for n, size in self.mesh.items() if size > 1 and n not in STANDARD_AXES)

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

    def where(self, placed: "Placed") -> Where:
        """Returns where a collective comes from, else what it reads or what reads it."""
        instructions = [placed.instruction]
        for value in self.values.operands(placed.computation, placed.instruction):
            if operand := self.values.instruction(value.computation, value.name):
                instructions.append(operand)
        users = self.values.users(placed.computation, placed.instruction.name)
        for user, _ in users:
            instructions.append(user)
            instructions += [one for one, _ in self.values.users(placed.computation, user.name)]
        # An argument is named by its path and has no source: what reads it tells more.
        found = [where_of(self.module, instruction) for instruction in instructions]
        return next((where for where in found if where.source), found[0])


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


def each(subject: Subject, opcodes: tuple[str, ...]) -> Iterator[tuple[str, Instruction]]:
    """Yields the instructions of some opcodes with the computations that they stand in."""
    for computation, instructions in subject.module.computations.items():
        for instruction in instructions:
            if instruction.opcode in opcodes:
                yield computation, instruction
