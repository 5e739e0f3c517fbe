"""Bytes that a step sends under a solution of the integer program, by collective and mesh axes."""

import collections
from collections.abc import Iterator, Mapping

from shardlib.cost.layout import AXES
from shardlib.cost.machine.fabric import sent_share
from shardlib.find.equivalence import Edge, OperationClass
from shardlib.find.moves import Kind
from shardlib.find.problem import LayoutProblem, Solution
from shardlib.partitioner.factors import Assignment, dims_of

Traffic = Mapping[tuple[str, tuple[str, ...]], float]
"""Bytes that a device sends in a step, by the kind of the collective, such as `all-gather`, and its
mesh axes in mesh order."""


def predicted_traffic(problem: LayoutProblem, solution: Solution) -> Traffic:
    """Returns what the moves of a solution send, by ring algorithms."""
    sent: dict[tuple[str, tuple[str, ...]], float] = collections.defaultdict(float)
    for operation, cut in zip(problem.classes.operations, solution.cuts, strict=True):
        for position, edge in enumerate(operation.edges):
            is_result = position >= len(operation.operands)
            for kind, axes, num_bytes in _moves(problem, solution, operation, cut, edge, is_result):
                named = tuple(axis for axis in AXES if axis in axes)
                share = sent_share(kind, problem.network.degree(axes))
                sent[kind.replace("_", "-"), named] += share * num_bytes
    return dict(sent)


def _moves(
    problem: LayoutProblem,
    solution: Solution,
    operation: OperationClass,
    cut: Assignment,
    edge: Edge,
    is_result: bool,
) -> Iterator[tuple[Kind, frozenset[str], float]]:
    """Yields the collectives between a tensor and an operation in a step, with all their bytes."""
    dims, pieces = solution.layouts[edge.tensor], dims_of(edge.dims, cut)
    pending = problem.pending(operation, cut, edge, is_result=is_result)
    is_param = problem.classes.tensors[edge.tensor].kind == "param"
    times = operation.times * edge.share
    times *= problem.objective.microbatches if is_param else 1
    there, back = problem.moves(operation, edge, is_result, dims, pieces, pending)
    for count, move in (*there, *back):
        for kind, axes, num_bytes in problem.network.collectives(edge.bytes, *move):
            yield kind, axes, num_bytes * times * count
