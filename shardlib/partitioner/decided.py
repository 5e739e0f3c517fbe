"""Whether the constraints of a model decide where its values lie, or leave it to a partitioner."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from shardlib.errors import PartitionError
from shardlib.jaxprs import REMAT, Operation, flatten, subprograms
from shardlib.partitioner.analyze import is_unsupported
from shardlib.partitioner.entry import Laid, Traced
from shardlib.partitioner.program import Program, Step, source_of


@dataclasses.dataclass(frozen=True)
class Partition:
    """Who partitions a function, and why."""

    by: Literal["shardlib", "XLA"]
    why: str


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def who_partitions(
    traced: Traced, analyze: Callable[[], Laid], constrains: bool | None = None
) -> tuple[Partition, Laid | None]:
    """Returns who partitions a function, and why; and its layouts if it is shardlib.

    XLA does where the function holds what shardlib cannot partition, and where constraints decide
    all layouts: then no product of the forward pass has to move an activation, operands and results
    of every product are cut alike, and a partitioner has nothing to choose.

    Args:
        traced: The function.
        analyze: Returns the layouts of its values.
        constrains: Whether the model constrains an activation; None if all constraints that the
            function holds are the model's.
    """
    operations = list(_operations(traced.closed.jaxpr))
    refused = next(filter(is_unsupported, operations), None)
    if refused is not None:
        return Partition("XLA", f"it holds {refused.name} at {source_of(refused)}"), None
    try:
        laid = analyze()
    except PartitionError as error:
        return Partition("XLA", str(error).partition("\n")[0]), None
    if constrains is None:
        constrains = any(operation.name == "sharding_constraint" for operation in operations)
    if not constrains:
        return Partition("shardlib", "the model constrains no activation"), laid
    why = next(_open(laid.program), None)
    if why is not None:
        return Partition("shardlib", why), laid
    return Partition("XLA", "the constraints of the model decide where each product lies"), None


def _operations(jaxpr: Any) -> Iterator[Operation]:
    for operation in flatten(jaxpr, fenced=True).operations:
        yield operation
        if operation.name in ("scan", "while", "cond", *REMAT):
            for body in subprograms(operation.equation):
                yield from _operations(body)


def _forward(program: Program) -> Iterator[Step]:
    """Yields the steps of a forward pass, those of bodies too: what was not transposed last."""
    for step in program.steps:
        if not step.operation.stack.lstrip("/").startswith("transpose("):
            yield step
            for body in step.bodies:
                yield from _forward(body)


def _open(program: Program) -> Iterator[str]:
    """Yields why layouts of products are open, or would be wrong in XLA's hands."""
    for step in _forward(program):
        operation = step.operation
        if operation.name not in _PRODUCTS:
            continue
        at, params = source_of(operation), operation.params
        if step.moved_bytes:
            yield f"no constraint decides where {operation.name} at {at} lies"
        if params.get("feature_group_count", 1) > 1 or params.get("batch_group_count", 1) > 1:
            yield f"XLA gets gradients of grouped convolutions wrong, as that at {at}"
