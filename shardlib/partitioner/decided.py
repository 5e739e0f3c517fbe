"""Whether the constraints of a model decide where its values lie, or leave it to a partitioner."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from shardlib.errors import PartitionError
from shardlib.jaxprs import REMAT, Operation, flatten, subprograms
from shardlib.partitioner.analyze import is_unsupported
from shardlib.partitioner.entry import Traced
from shardlib.partitioner.program import Program, Step, source_of


@dataclasses.dataclass(frozen=True)
class Partition:
    """Who partitions a function, and why."""

    by: Literal["shardlib", "XLA"]
    why: str


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def who_partitions(traced: Traced, analyze: Callable[[], Program]) -> Partition:
    """Returns who partitions a function, and why.

    XLA does where the function holds what shardlib cannot partition, and where constraints decide
    all layouts: then no product has to move an activation, operands and results of every product
    are cut alike, and a partitioner has nothing to choose.

    Args:
        traced: The function, without derivatives.
        analyze: Returns the layouts of its values.
    """
    operations = list(_operations(traced.closed.jaxpr))
    refused = next(filter(is_unsupported, operations), None)
    if refused is not None:
        return Partition("XLA", f"it holds {refused.name} at {source_of(refused)}")
    if all(operation.name != "sharding_constraint" for operation in operations):
        return Partition("shardlib", "the model constrains no activation")
    try:
        program = analyze()
    except PartitionError as error:  # a constraint that shardlib cannot keep
        return Partition("XLA", str(error).partition("\n")[0])
    why = next(_open(program.walk()), None)
    if why is not None:
        return Partition("shardlib", why)
    return Partition("XLA", "the constraints of the model decide where each product lies")


def _operations(jaxpr: Any) -> Iterator[Operation]:
    for operation in flatten(jaxpr, fenced=True).operations:
        yield operation
        if operation.name in ("scan", "while", "cond", *REMAT):
            for body in subprograms(operation.equation):
                yield from _operations(body)


def _open(steps: Iterable[Step]) -> Iterator[str]:
    """Yields why layouts of products are open, or would be wrong in XLA's hands."""
    for step in steps:
        operation = step.operation
        if operation.name not in _PRODUCTS:
            continue
        at, params = source_of(operation), operation.params
        if step.moved_bytes:
            yield f"no constraint decides where {operation.name} at {at} lies"
        if params.get("feature_group_count", 1) > 1 or params.get("batch_group_count", 1) > 1:
            yield f"XLA gets gradients of grouped convolutions wrong, as that at {at}"
