"""The subject of the checks: a compiled step with its mesh, cluster, arguments and jaxpr."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardlib.explain.analysis.collectives import Collective, ProgramReport, read_program
from shardlib.explain.analysis.equations import equations
from shardlib.explain.analysis.params import ParamsReport
from shardlib.explain.aot.compile import CompiledStep, argument_names
from shardlib.explain.hlo.provenance import (
    Where,
    is_library,
    makes_reports,
    outermost_source,
    where_of,
)
from shardlib.explain.hlo.text import Instruction, Module, array_bytes, parse
from shardlib.explain.lint.arguments import Argument, read_arguments
from shardlib.explain.lint.findings import Limits
from shardlib.explain.lint.values import Value, Values
from shardlib.hardware import Cluster
from shardlib.mesh import STANDARD_AXES

DEFAULTS = Limits()
BATCH_AXES = ("data", "fsdp", "expert")
"""Preset mesh axes that split the rows of a batch."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A compiled step. Checks skip the attributes that are left out.

    Attributes:
        text: Text of the compiled program.
        mesh: Sizes of the mesh axes, in mesh order.
        cluster: Cluster that it is compiled for.
        arguments: Arguments as pytrees of `ShapeDtypeStruct` with shardings.
        names: Category of each array by path, as in `CompiledStep.argument_names`.
        donated: Whether each leaf of `arguments` is donated, in order.
        warnings: Text that the compiler wrote to stderr.
        jaxpr: The traced step.
        state: Report on the state, for its rules.
        limits: The smallest sizes that are reported.
        module: Program parsed from `text`.
        program: Report on its collectives.
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
        """Returns the subject for a step compiled ahead of time.

        Args:
            step: The step.
            state: Report on its state.
            limits: The smallest sizes that are reported.
            module: The step's text, if it is already parsed.
            program: Its collectives, if they are already read.
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
        """The program's values, for tracing them back."""
        return Values(self.module)

    @functools.cached_property
    def platform(self) -> str:
        """The platform of the cluster, else of the HLO dialect: `cpu`, `gpu` or `tpu`."""
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
        """The `file:line` of the traced function, else of its first line that computes.

        The string is empty if the function belongs to a library.
        """
        info = getattr(getattr(self.jaxpr, "jaxpr", None), "debug_info", None)
        found = re.search(r" at (.+:\d+)$", getattr(info, "func_src_info", None) or "")
        source = found[1] if found else ""
        if not makes_reports(source):
            return "" if is_library(source) else source
        # A step moved to another mesh is wrapped in another function.
        placed = equations(self.jaxpr)
        return next(filter(None, (outermost_source(p.equation) for p in placed)), "")

    @functools.cached_property
    def by_number(self) -> dict[int, Argument]:
        """The arrays by their index among the program's parameters."""
        return {leaf.number: leaf for leaf in self.leaves if leaf.number is not None}

    @functools.cached_property
    def batch(self) -> tuple[Argument, ...]:
        """The arrays outside the state, whose rows are split over devices."""
        return tuple(leaf for leaf in self.leaves if not leaf.is_state and leaf.shape)

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of the batch.

        The preset batch axes are the fallback if its sharding is unknown or nothing splits it.
        """
        axes = {name for leaf in self.batch if leaf.spec for name in leaf.spec[0]} or BATCH_AXES
        return tuple(name for name in self.mesh if name in axes and self.mesh[name] > 1)

    @functools.cached_property
    def own_axes(self) -> tuple[str, ...]:
        """The mesh axes of more than one device whose names are not in the presets."""
        return tuple(n for n, size in self.mesh.items() if size > 1 and n not in STANDARD_AXES)

    @functools.cached_property
    def collectives(self) -> tuple["Placed", ...]:
        """The collectives with their computations and instructions."""
        where = {
            instruction.name: (computation, instruction)
            for computation, instructions in self.module.computations.items()
            for instruction in instructions
        }
        return tuple(
            Placed(collective, *where[collective.name]) for collective in self.program.collectives
        )

    def remembered(self, name: str, make: Callable[["Subject"], Any]) -> Any:
        """Returns `make(self)`, computed once for each name."""
        if name not in self._memory:
            self._memory[name] = make(self)
        return self._memory[name]

    @functools.cached_property
    def _memory(self) -> dict[str, Any]:
        return {}

    def arguments_of(self, value: Value) -> list[Argument] | None:
        """Returns the arguments that a value consists of, moved but not computed, or None."""
        origins = self.values.origins(value)
        if any(origin.argument is None and origin.opcode != "constant" for origin in origins):
            return None
        numbers = [o.argument for o in origins if o.argument is not None]
        found = [self.by_number.get(number) for number in numbers]
        return [leaf for leaf in found if leaf is not None] if all(found) else None

    def where(self, placed: "Placed") -> Where:
        """Returns the source place of a collective, else of an operand or of a user."""
        instructions = [placed.instruction]
        for value in self.values.operands(placed.computation, placed.instruction):
            if operand := self.values.instruction(value.computation, value.name):
                instructions.append(operand)
        users = self.values.users(placed.computation, placed.instruction.name)
        for user, _ in users:
            instructions.append(user)
            instructions += [one for one, _ in self.values.users(placed.computation, user.name)]
        # An argument has only a path and no source, so its users are more precise.
        found = [where_of(self.module, instruction) for instruction in instructions]
        return next((where for where in found if where.source), found[0])


@dataclasses.dataclass(frozen=True)
class Placed:
    """A collective with its computation and instruction."""

    collective: Collective
    computation: str
    instruction: Instruction

    @property
    def bytes(self) -> int:
        """The bytes of its buffer in one execution."""
        return self.collective.bytes


def largest(shapes: tuple[str, ...]) -> str:
    """Returns the largest of the arrays, such as `bf16[8,512]`, and the number of others."""
    first = max(shapes, key=array_bytes, default="")
    return first if len(shapes) < 2 else f"{first} and {len(shapes) - 1} more"


def array_text(array: Any) -> str:
    """Returns the dtype and shape of an array, such as `float32[4,8]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def each(subject: Subject, opcodes: tuple[str, ...]) -> Iterator[tuple[str, Instruction]]:
    """Yields the instructions with one of the opcodes, and their computations."""
    for computation, instructions in subject.module.computations.items():
        for instruction in instructions:
            if instruction.opcode in opcodes:
                yield computation, instruction
