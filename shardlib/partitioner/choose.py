"""The assignment of mesh axes to factors of an operation that moves the fewest bytes."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from shardlib.partitioner.factors import Dim, Factors
from shardlib.partitioner.layout import Dims, Layout, Sizes, degree, moved_bytes

# Cost of an operation in addition to communication, in bytes on a link, with rounded figures of one
# accelerator: 1e14 FLOP/s, 8e11 B/s of memory, 5e10 B/s of link (TPU v5e: 1.97e14, 8.2e11, 4.5e10).
# Only ratios matter, and only where layouts conflict.
_FLOPS_PER_LINK_BYTE = 2000.0
_MEMORY_PER_LINK_BYTE = 16.0
_MAX_COMBINATIONS = 512

Assignment = dict[int, tuple[str, ...]]
"""The mesh axes of each cut factor, major to minor."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The inputs of a choice.

    `operands` are the layouts of the operands, `bytes` and `result_bytes` the sizes of the whole
    operands and results. `wanted` are the dims that readers want for the results, None if unknown.
    """

    factors: Factors
    operands: tuple[Layout, ...]
    bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    wanted: tuple[Dims | None, ...]


def dims_of(factors: Sequence[Dim], assignment: Mapping[int, tuple[str, ...]]) -> Dims:
    """Returns the axes of each dim of a value whose dims have these factors."""
    return tuple(assignment.get(factor, ()) if factor is not None else () for factor in factors)


def choose(choice: Choice, sizes: Sizes) -> Assignment:
    """Returns the cheapest assignment of the axes that cut the operands to factors.

    An axis that cuts no operand goes where the reader of a result wants it, if that costs nothing.
    Ties go to the assignment that leaves the largest operands in place.
    """
    votes = _votes(choice)
    pending = frozenset().union(*(layout.pending for layout in choice.operands))
    votes = {axis: where for axis, where in votes.items() if axis not in pending}
    options = [list(dict.fromkeys(where)) for where in votes.values()]
    if all(len(one) == 1 and one[0] is not None for one in options):
        found = _ordered(zip(votes, (one[0] for one in options), strict=True), choice)
        if _divides(found, choice.factors, sizes):
            return _take_wanted(found, choice, sizes, pending)
    best, least = {}, math.inf
    for combination in _combinations(options):
        found = _ordered(zip(votes, combination, strict=True), choice)
        if not _divides(found, choice.factors, sizes):
            continue
        cost = _cost(found, choice, sizes)
        if cost < least:
            best, least = found, cost
    return _take_wanted(best, choice, sizes, pending)


def _votes(choice: Choice) -> dict[str, list[Dim]]:
    """Returns the factors that each axis cuts in some operand, the largest operand first."""
    votes: dict[str, list[Dim]] = {}
    order = sorted(range(len(choice.operands)), key=lambda i: -choice.bytes[i])
    for i in order:
        layout = choice.operands[i]
        if layout.made:
            continue
        for factor, axes in zip(choice.factors.operands[i], layout.dims, strict=True):
            for axis in axes:
                votes.setdefault(axis, []).append(factor)
    return votes


def _combinations(options: list[list[Dim]]) -> Iterator[tuple[Dim, ...]]:
    choices = [[*[f for f in one if f is not None], None] for one in options]
    if math.prod(map(len, choices)) > _MAX_COMBINATIONS:
        # The first option of each axis is the factor of the largest operand.
        choices = [[one[0], None] if len(one) > 1 else one for one in choices]
    return itertools.islice(itertools.product(*choices), 4 * _MAX_COMBINATIONS)


def _ordered(pairs: Iterator[tuple[str, Dim]], choice: Choice) -> Assignment:
    """Groups axes by factor, in the order of the largest operand."""
    found: Assignment = {}
    for axis, factor in pairs:
        if factor is not None:
            found[factor] = (*found.get(factor, ()), axis)
    for factor, axes in found.items():
        if len(axes) > 1:
            found[factor] = _order(factor, axes, choice)
    return found


def _order(factor: int, axes: tuple[str, ...], choice: Choice) -> tuple[str, ...]:
    order = sorted(range(len(choice.operands)), key=lambda i: -choice.bytes[i])
    ranks: dict[str, int] = {}
    for i in order:
        if choice.operands[i].made:
            continue
        for f, dims in zip(choice.factors.operands[i], choice.operands[i].dims, strict=True):
            if f == factor:
                for axis in dims:
                    ranks.setdefault(axis, len(ranks))
    return tuple(sorted(axes, key=lambda axis: ranks.get(axis, len(ranks))))


def _divides(found: Assignment, factors: Factors, sizes: Sizes) -> bool:
    return all(factors.sizes[f] % degree(axes, sizes) == 0 for f, axes in found.items())


def _cost(found: Assignment, choice: Choice, sizes: Sizes) -> float:
    factors = choice.factors
    parts = math.prod(degree(axes, sizes) for axes in found.values())
    cost = factors.flops / parts / _FLOPS_PER_LINK_BYTE
    operands = zip(choice.operands, factors.operands, choice.bytes, strict=True)
    for layout, dims, size in operands:
        cost += moved_bytes(size, layout, dims_of(dims, found), sizes)
    summed = degree([a for f in factors.reduced for a in found.get(f, ())], sizes)
    for dims, size in zip(factors.results, choice.result_bytes, strict=True):
        cut = degree([axis for dim in dims_of(dims, found) for axis in dim], sizes)
        cost += size / cut * (1 / _MEMORY_PER_LINK_BYTE + 2 * (summed - 1) / summed)
    return cost


def _take_wanted(
    found: Assignment, choice: Choice, sizes: Sizes, pending: frozenset[str]
) -> Assignment:
    """Adds axes that the readers of the results want and that require no move of an operand."""
    used = {axis for axes in found.values() for axis in axes} | pending
    for dims, wanted in zip(choice.factors.results, choice.wanted, strict=True):
        for factor, axes in zip(dims, wanted or (), strict=wanted is not None):
            for axis in axes:
                if factor is None or axis in used:
                    continue
                more = (*found.get(factor, ()), axis)
                if choice.factors.sizes[factor] % degree(more, sizes) == 0:
                    found = {**found, factor: more}
                    used.add(axis)
    return found
