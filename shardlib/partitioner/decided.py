"""The decision whether shardlib or XLA partitions a function, by the model's constraints."""

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
    """The partitioner of a function, and the reason."""

    by: Literal["shardlib", "XLA"]
    why: str


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def who_partitions(
    traced: Traced, analyze: Callable[[], Laid], constrains: bool | None = None
) -> tuple[Partition, Laid | None]:
    """Returns the partitioner of a function, and the function's layouts if it is shardlib.

    XLA partitions functions with operations that shardlib cannot partition, and functions whose
    constraints decide all layouts. In the latter no product of the forward pass has to move an
    activation, the operands and results of every product are cut alike, and a partitioner has
    nothing to choose.

    Args:
        traced: The function.
        analyze: Returns the layouts of its values.
        constrains: Whether the model constrains an activation; None if all constraints in the
            function belong to the model.
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
    """Yields the steps of a forward pass, including bodies: all but transposed operations."""
    for step in program.steps:
        if not step.operation.stack.lstrip("/").startswith("transpose("):
            yield step
            for body in step.bodies:
                yield from _forward(body)


def _open(program: Program) -> Iterator[str]:
    """Yields the reasons why layouts of products are open, or would be wrong under XLA."""
    for step in _forward(program):
        operation = step.operation
        if operation.name not in _PRODUCTS:
            continue
        at, params = source_of(operation), operation.params
        if step.moved_bytes:
            yield f"no constraint decides the layout of {operation.name} at {at}"
        if params.get("feature_group_count", 1) > 1 or params.get("batch_group_count", 1) > 1:
            yield f"XLA computes wrong gradients of grouped convolutions, such as the one at {at}"
