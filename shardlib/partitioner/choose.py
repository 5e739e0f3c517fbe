"""The assignment of mesh axes to factors of an operation that moves the fewest bytes."""

import dataclasses
import itertools
import math
from collections.abc import Iterator

from shardlib.partitioner.factors import Assignment, Dim, Factors, dims_of
from shardlib.partitioner.layout import Dims, Sizes, ValueLayout, degree, moved_bytes

# Cost of an operation in addition to communication, in bytes on a link, with rounded figures of one
# accelerator: 1e14 FLOP/s, 8e11 B/s of memory, 5e10 B/s of link (TPU v5e: 1.97e14, 8.2e11, 4.5e10).
# Only ratios matter, and only where layouts conflict.
_FLOPS_PER_LINK_BYTE = 2000.0
_MEMORY_PER_LINK_BYTE = 16.0
_MAX_COMBINATIONS = 512


@dataclasses.dataclass(frozen=True)
class CutProblem:
    """An operation whose factors are to be cut by mesh axes.

    `operands` are the layouts of the operands, `bytes` and `result_bytes` the sizes of the whole
    operands and results. `wanted` are the dims that readers want for the results, None if unknown.
    `planned` are the dims in which rules want the results; empty without such rules. `sharers` are
    the operations that share a move of each operand, if the cut follows the operands alone, or if
    rules place the results (`is_placed`): other readers then have the same plan. `terms` are the
    products that share the sum over devices of each planned result, as they are added up. `rows`
    are mesh axes that cut the batch: none shares a move that makes rows whole.
    """

    factors: Factors
    operands: tuple[ValueLayout, ...]
    bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    wanted: tuple[Dims | None, ...]
    planned: tuple[Dims | None, ...] = ()
    sharers: tuple[int, ...] = ()
    is_placed: bool = False
    terms: tuple[int, ...] = ()
    rows: frozenset[str] = frozenset()

    def cuts(self) -> Iterator[tuple[str, Dim]]:
        """Yields each mesh axis with a factor that it cuts, the largest operand first."""
        for i in sorted(range(len(self.operands)), key=lambda i: -self.bytes[i]):
            if self.operands[i].made:
                continue
            pairs = zip(self.factors.operands[i], self.operands[i].dims, strict=True)
            yield from ((axis, factor) for factor, axes in pairs for axis in axes)

    def plans(self) -> Iterator[tuple[str, Dim]]:
        """Yields each mesh axis with the factor that it cuts in the planned results."""
        for dims, planned in zip(self.factors.results, self.planned, strict=False):
            for factor, axes in zip(dims, planned or (), strict=planned is not None):
                yield from ((axis, factor) for axis in axes if factor is not None)


def choose(problem: CutProblem, sizes: Sizes) -> Assignment:
    """Returns the cheapest assignment of the axes that cut the operands to factors.

    An axis that cuts no operand goes where the reader of a result wants it, if that costs nothing.
    Ties go to the assignment that leaves the largest operands in place.
    """
    pending = frozenset().union(*(layout.pending for layout in problem.operands))
    votes: dict[str, dict[Dim, None]] = {}
    for axis, factor in problem.cuts():
        if axis not in pending:
            votes.setdefault(axis, {})[factor] = None
    for axis, factor in problem.plans():
        if axis in votes:
            votes[axis][factor] = None
    options = [list(factors) for factors in votes.values()]
    if all(len(one) == 1 and one[0] is not None for one in options):
        agreed = _ordered(zip(votes, (one[0] for one in options), strict=True), problem)
        if _divides(agreed, problem.factors, sizes):
            return _take_wanted(agreed, problem, sizes, pending)
    best, least = {}, math.inf
    for combination in _combinations(options):
        assignment = _ordered(zip(votes, combination, strict=True), problem)
        if not _divides(assignment, problem.factors, sizes):
            continue
        cost = _cost(assignment, problem, sizes)
        if cost < least:
            best, least = assignment, cost
    return _take_wanted(best, problem, sizes, pending)


def _combinations(options: list[list[Dim]]) -> Iterator[tuple[Dim, ...]]:
    choices = [[*[f for f in one if f is not None], None] for one in options]
    if math.prod(map(len, choices)) > _MAX_COMBINATIONS:
        # The first option of each axis is the factor of the largest operand.
        choices = [[one[0], None] if len(one) > 1 else one for one in choices]
    return itertools.islice(itertools.product(*choices), 4 * _MAX_COMBINATIONS)


def _ordered(chosen: Iterator[tuple[str, Dim]], problem: CutProblem) -> Assignment:
    """Groups axes by factor, in the order of the largest operand."""
    assignment: Assignment = {}
    for axis, factor in chosen:
        if factor is not None:
            assignment[factor] = (*assignment.get(factor, ()), axis)
    for factor, axes in assignment.items():
        if len(axes) > 1:
            pairs = (*problem.cuts(), *problem.plans())
            ranked = list(dict.fromkeys(axis for axis, f in pairs if f == factor))
            assignment[factor] = tuple(sorted(axes, key=ranked.index))
    return assignment


def _divides(assignment: Assignment, factors: Factors, sizes: Sizes) -> bool:
    return all(factors.sizes[f] % degree(axes, sizes) == 0 for f, axes in assignment.items())


def _cost(assignment: Assignment, problem: CutProblem, sizes: Sizes) -> float:
    factors = problem.factors
    parts = math.prod(degree(axes, sizes) for axes in assignment.values())
    cost = factors.flops / parts / _FLOPS_PER_LINK_BYTE
    pairs = {(axis, factor) for factor, axes in assignment.items() for axis in axes}
    follows = {*problem.cuts(), *(problem.plans() if problem.is_placed else ())}
    shared = bool(problem.sharers) and pairs <= follows
    sharers = problem.sharers if shared else (1,) * len(problem.operands)
    operands = zip(problem.operands, factors.operands, problem.bytes, sharers, strict=True)
    for layout, dims, size, count in operands:
        taken = dims_of(dims, assignment)
        gone = problem.rows.intersection(layout.axes).difference(*taken)
        cost += moved_bytes(size if gone else size / count, layout, taken, sizes)
    summed = degree([a for f in factors.reduced for a in assignment.get(f, ())], sizes)
    planned = problem.planned or (None,) * len(factors.results)
    terms = problem.terms or (1,) * len(factors.results)
    results = zip(factors.results, problem.result_bytes, planned, terms, strict=True)
    for dims, size, plan, count in results:
        made = dims_of(dims, assignment)
        cut = degree([axis for dim in made for axis in dim], sizes)
        if plan is None:
            cost += size / cut * (1 / _MEMORY_PER_LINK_BYTE + 2 * (summed - 1) / summed)
            continue
        pending = frozenset(a for f in factors.reduced for a in assignment.get(f, ()))
        moved = moved_bytes(size / count, ValueLayout(made, pending), plan, sizes)
        cost += size / cut / _MEMORY_PER_LINK_BYTE + moved
    return cost


def _take_wanted(
    assignment: Assignment, problem: CutProblem, sizes: Sizes, pending: frozenset[str]
) -> Assignment:
    """Adds axes that the readers of the results want and that require no move of an operand."""
    used = {axis for axes in assignment.values() for axis in axes} | pending
    for dims, wanted in zip(problem.factors.results, problem.wanted, strict=True):
        for factor, axes in zip(dims, wanted or (), strict=wanted is not None):
            for axis in axes:
                if factor is None or axis in used:
                    continue
                more = (*assignment.get(factor, ()), axis)
                if problem.factors.sizes[factor] % degree(more, sizes) == 0:
                    assignment = {**assignment, factor: more}
                    used.add(axis)
    return assignment
