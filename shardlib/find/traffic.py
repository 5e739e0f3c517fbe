"""Bytes that a step sends under a solution of the integer program, by collective and mesh axes."""

import collections
import math
from collections.abc import Collection, Iterator, Mapping

from shardlib.cost.layout import AXES, Layout
from shardlib.cost.machine.fabric import sent_share
from shardlib.find.context import CONTEXT, exchanges
from shardlib.find.equivalence import Edge, OperationClass
from shardlib.find.moves import Kind
from shardlib.find.problem import LayoutProblem, Solution
from shardlib.partitioner.factors import Assignment, dims_of
from shardlib.plan.workloads.traced import TracedWorkload

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
                _add(sent, problem, kind, axes, num_bytes)
        for kind, num_bytes in exchanges(problem.classes, operation, cut, problem.network):
            _add(sent, problem, kind, frozenset((CONTEXT,)), operation.times * num_bytes)
    return dict(sent)


def counted_traffic(workload: TracedWorkload, layout: Layout) -> Traffic:
    """Returns what a traced step sends, by ring algorithms."""
    sent: dict[tuple[str, tuple[str, ...]], float] = collections.defaultdict(float)

    def add(kind: str, axes: Collection[str], num_bytes: float) -> None:
        share = sent_share(kind, math.prod(layout.size(axis) for axis in axes))
        sent[collective_name(kind), tuple(a for a in AXES if a in axes)] += share * num_bytes

    gradient, update = workload.costs(layout, workload.platform)
    parts = [(gradient, layout.microbatches), (update, 1)]
    if gradient.staged is not None:
        parts.append((gradient.staged, layout.microbatches))
    for tally, times in parts:
        for (_, moved), count in tally.moved.items():
            add(moved.kind, moved.axes, times * count * moved.num_bytes)
    for one in workload.between_stages(layout, gradient):
        add(one.kind, one.axes, one.count * one.num_bytes)
    return dict(sent)


def _add(
    sent: dict[tuple[str, tuple[str, ...]], float],
    problem: LayoutProblem,
    kind: Kind,
    axes: frozenset[str],
    num_bytes: float,
) -> None:
    """Adds what a device sends in a collective."""
    share = sent_share(kind, problem.network.degree(axes))
    sent[collective_name(kind), tuple(a for a in AXES if a in axes)] += share * num_bytes


def collective_name(kind: str) -> str:
    """Returns the name of a collective in a compiled program."""
    return "collective-permute" if kind == "shift" else kind.replace("_", "-")


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
    piece = pieces, problem.pending(operation, cut, edge, is_result=is_result)
    is_param = problem.classes.tensors[edge.tensor].kind == "param"
    times = operation.times * edge.share
    times *= problem.objective.microbatches if is_param else 1
    there, back = problem.edge_moves.forward_and_backward(edge, is_result, dims, piece)
    for count, move in (*there, *back):
        for kind, axes, num_bytes in problem.network.collectives(edge.bytes, *move):
            yield kind, axes, num_bytes * times * count
