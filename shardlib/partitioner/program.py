"""A partitioned program as plain data: what is decided about each operation."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.extend.source_info_util import summarize

from shardlib.jaxprs import Operation
from shardlib.jaxprs import Program as Flat
from shardlib.partitioner.choose import Assignment
from shardlib.partitioner.factors import Factors
from shardlib.partitioner.layout import Layout, num_bytes

_LARGE = 2**20
"""Bytes from which on it matters that every device holds a value whole."""


@dataclasses.dataclass
class Step:
    """One operation: where its operands go, and where its results lie."""

    operation: Operation
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    assignment: Assignment = dataclasses.field(default_factory=dict)
    factors: Factors | None = None
    """None for what is not cut by factors: loops, constraints, and what is computed whole."""
    bodies: tuple["Program", ...] = ()
    moved_bytes: float = 0.0
    """Bytes that a device receives to bring activations to where the operation wants them."""
    is_whole: bool = False
    """Whether every device computes it whole, because no rule says how it may be cut."""
    settled: tuple[Layout, ...] | None = None
    """Where the results lie after sums were taken that cannot wait; None if they stay."""

    @property
    def made(self) -> bool:
        """Whether the results are made in the layouts in which they are read."""
        return self.factors is not None and all(layout.made for layout in self.results)


@dataclasses.dataclass
class Program:
    """A partitioned jaxpr, its calls written out."""

    flat: Flat
    inputs: tuple[Layout, ...]
    steps: list[Step]
    outputs: tuple[Layout, ...]

    def walk(self) -> Iterator[Step]:
        """Yields all steps, those of bodies after the step that runs them."""
        for step in self.steps:
            yield step
            for body in step.bodies:
                yield from body.walk()

    def held_whole(self) -> list[str]:
        """Returns what every device computes whole, where that is large: operations with lines."""
        found: dict[str, int] = {}
        for step in self.walk():
            operation = step.operation
            most = max(num_bytes(var.aval) for var in (*operation.invars, *operation.outvars))
            if step.is_whole and most >= _LARGE:
                name = f"{operation.name} at {source_of(operation)}"
                found[name] = max(most, found.get(name, 0))
        return [f"{name} ({size / 2**20:.1f} MiB)" for name, size in found.items()]


def source_of(operation: Any) -> str:
    """Returns the source line that an operation comes from."""
    return summarize(operation.equation.source_info) or "a line that JAX did not record"
