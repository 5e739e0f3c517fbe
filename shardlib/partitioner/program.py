"""A partitioned program as plain data: the decisions about each operation."""

import dataclasses
from collections.abc import Iterator

from jax.extend.source_info_util import summarize

from shardlib.explain.hlo.provenance import innermost_source
from shardlib.humanize import size
from shardlib.jaxprs import FlatProgram, Operation
from shardlib.partitioner.factors import Assignment, Factors
from shardlib.partitioner.layout import ValueLayout, num_bytes

_LARGE = 2**20
"""Bytes from which a value replicated on every device is reported."""


@dataclasses.dataclass
class Step:
    """One operation with the layouts of its operands and results."""

    operation: Operation
    operands: tuple[ValueLayout, ...]
    results: tuple[ValueLayout, ...]
    assignment: Assignment = dataclasses.field(default_factory=dict)
    factors: Factors | None = None
    """None for steps without factors: loops, constraints and whole computations."""
    bodies: tuple["PartitionedProgram", ...] = ()
    moved_bytes: float = 0.0
    """Bytes that a device receives to bring activations into the layouts of the operands."""
    is_whole: bool = False
    """Whether every device computes it whole, because no rule can cut it."""
    settled: tuple[ValueLayout, ...] | None = None
    """Layouts of the results after sums that cannot wait; None if they stay as they are."""

    @property
    def made(self) -> bool:
        """Whether the results are made in the layouts in which they are read: constants, and
        parameters in a wider dtype, which are gathered in their own."""
        if self.factors is None:
            return False
        return all(layout.made for layout in self.results) or self._widens_parameter()

    def _widens_parameter(self) -> bool:
        if self.operation.name != "convert_element_type" or not self.results[0].stored:
            return False
        have, want = (v.aval.dtype for v in (*self.operation.invars, *self.operation.outvars))
        return want.itemsize > have.itemsize


@dataclasses.dataclass
class PartitionedProgram:
    """A partitioned jaxpr with inlined calls."""

    flat: FlatProgram
    inputs: tuple[ValueLayout, ...]
    steps: list[Step]
    outputs: tuple[ValueLayout, ...]

    def walk(self) -> Iterator[Step]:
        """Yields all steps, with the steps of bodies after the step that runs them."""
        for step in self.steps:
            yield step
            for body in step.bodies:
                yield from body.walk()

    def held_whole(self) -> list[str]:
        """Returns the large operations that every device computes whole, with source lines."""
        sizes: dict[str, int] = {}
        for step in self.walk():
            if not step.is_whole:
                continue
            operation = step.operation
            most = max(num_bytes(var.aval) for var in (*operation.invars, *operation.outvars))
            if most >= _LARGE:
                name = f"{operation.name} at {source_of(operation)}"
                sizes[name] = max(most, sizes.get(name, 0))
        return [f"{name} ({size(most)})" for name, most in sizes.items()]


def source_of(operation: Operation) -> str:
    """Returns the source line that an operation comes from: the user's, if there is one."""
    equation = operation.equation
    found = innermost_source(equation) or summarize(equation.source_info)
    return found or "a line that JAX did not record"
