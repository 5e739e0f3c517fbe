"""Whether the constraints of a model decide where its values lie, or leave it to a partitioner."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from shardlib.partitioner.program import Program, Step, source_of


@dataclasses.dataclass(frozen=True)
class Partition:
    """Who partitions a function, and why."""

    by: Literal["shardlib", "XLA"]
    why: str


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def undecided(program: Program) -> str | None:
    """Returns why a program is not decided by its own constraints; None where it is.

    It is where the model constrains activations and no product has to move one of them: then
    operands and results of every product are cut alike, and a partitioner has nothing to choose.
    """
    steps = list(program.walk())
    if not any(step.operation.name == "sharding_constraint" for step in steps):
        return "the model constrains no activation"
    return next(_faults(steps), None)


def _faults(steps: Iterable[Step]) -> Any:
    for step in steps:
        name = step.operation.name
        if name not in _PRODUCTS:
            continue
        if step.moved_bytes:
            yield f"no constraint decides where {name} at {source_of(step.operation)} lies"
        params = step.operation.params
        if params.get("feature_group_count", 1) > 1 or params.get("batch_group_count", 1) > 1:
            yield f"XLA gets gradients of grouped convolutions wrong: {source_of(step.operation)}"
