"""The relation between a value of a whole batch and its values for equal parts of the batch.

This is the arithmetic behind `row_sums`: which operations keep rows apart, and which keep sums.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jax.lax import GatherScatterMode

from shardlib.jaxprs import Operation
from shardlib.partitioner.factors import Factors, factors_of
from shardlib.partitioner.program import source_of

Kind = Literal["same", "rows", "sum", "max", "min", "lost"]

KEY = "the loss reads the random key"
"""The reason of a value that depends on the key of the batch, before any number is drawn."""


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The relation between a value of the whole batch and its values for n equal parts.

    The value of the whole is n ** degree times one of these: the value of any part (`same`), the
    rows of all parts one after the other (`rows`), or their sum, maximum or minimum. `lost` means
    that no relation is known.
    """

    kind: Kind
    degree: int = 0
    zero: bool = False
    """Whether the value is known to be all zeros."""
    why: str = ""
    """The reason of a lost value."""

    @property
    def plain(self) -> bool:
        """Whether the value is the same, or keeps its rows, without a factor."""
        return self.kind in ("same", "rows") and not self.degree

    def as_sum(self) -> "Spread":
        """Returns the relation as a sum, if it is one: n equal values sum to n times the value."""
        return Spread("sum", self.degree - 1, self.zero) if self.kind == "same" else self


SAME, ROWS, ZERO = Spread("same"), Spread("rows"), Spread("same", zero=True)


def lost(why: str) -> Spread:
    """Returns the relation of a value that follows from no values of the parts."""
    return Spread("lost", why=why)


def first_lost(spreads: Sequence[Spread]) -> Spread | None:
    """Returns the first lost value."""
    return next((x for x in spreads if x.kind == "lost"), None)


# Linear in each operand while the others are fixed.
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
# Linear in the first operand; the others select elements or are left out.
_FIRST = """
    broadcast_in_dim convert_element_type copy copy_p cumsum dynamic_slice expand_dims gather imag
    name neg real reduce_precision reduce_sum reshape reshard rev slice split squeeze
    stop_gradient transpose
"""
_LINEAR = frozenset(_FIRST.split())
# Linear in several operands together: the positions of the operands, None for all.
_JOINTLY: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("add", "add_any", "sub", "concatenate", "stack"), (0, None)),
    "select_n": (1, None),
    **dict.fromkeys(("dynamic_update_slice", "pad"), (0, 2)),
}
_ADDS_AT = frozenset({"scatter-add", "scatter_add"})
_SUMMING = frozenset({"reduce_sum", *_PRODUCTS, *_ADDS_AT})
_WIDE_BYTES = 4
"""Sums of integers of this size or more are assumed not to wrap around."""
_EXTREMES: dict[str, Kind] = {"reduce_max": "max", "reduce_min": "min"}
_RESHAPING = frozenset({"broadcast_in_dim", "copy", "expand_dims", "reshape", "reshard", "squeeze"})


def joined(spreads: Sequence[Spread]) -> Spread | None:
    """Returns the relation of a sum of values, or of one of them; None if there is no one
    relation."""
    moving = [x for x in spreads if not x.zero]
    if not moving:
        moving = list(spreads)
    if any(x.kind == "sum" for x in moving):
        moving = [x.as_sum() for x in moving]
    kind = _only_kind(spreads)
    if kind is None or len({x.degree for x in moving}) > 1:
        return None
    return Spread(kind, moving[0].degree, all(x.zero for x in spreads))


def _only_kind(spreads: Sequence[Spread]) -> Kind | None:
    """Returns the one kind besides `same`, or `same` if there is no other; None for several."""
    kinds: set[Kind] = {x.kind for x in spreads if x.kind != "same"}
    if len(kinds) > 1:
        return None
    return kinds.pop() if kinds else "same"


def of_result(operation: Operation, ins: Sequence[Spread]) -> Spread | None:
    """Returns the relation of the results of an operation that reduces no rows; None if there is
    none. It is `rows` if an operand has rows."""
    name = operation.name
    if all(x.plain for x in ins):
        # A gather may fill in other numbers.
        is_zero = bool(ins) and ins[0].zero and name in _LINEAR and name != "gather"
        has_rows = any(x.kind == "rows" for x in ins)
        return Spread("rows" if has_rows else "same", zero=is_zero)
    if _fills(operation):
        return None
    if name in _LINEAR and all(x.plain for x in ins[1:]) and _keeps_numbers(operation):
        return _of_kind(ins, ins[0].degree, ins[0].zero)
    if name in _PRODUCTS and sum(x.kind == "sum" for x in ins) <= 1:
        return _of_kind(ins, sum(x.degree for x in ins))
    if name == "div" and ins[1].kind != "sum" and not _is_integer(operation):
        return _of_kind(ins, ins[0].degree - ins[1].degree)
    extreme = any(x.kind in ("max", "min") for x in ins)
    if name in _JOINTLY and not extreme:
        start, stop = _JOINTLY[name]
        terms, others = ins[start:stop], [*ins[:start], *(ins[stop:] if stop else ())]
        return joined(terms) if _select(terms, others) else None
    if name in _ADDS_AT and not extreme:
        terms = [ins[0], ins[2]]
        return joined(terms) if _select(terms, [ins[1]]) else None
    return ins[0] if name in _RESHAPING and extreme and len(ins) == 1 else None


def _of_kind(ins: Sequence[Spread], degree: int, zero: bool = False) -> Spread | None:
    """Returns the relation of the one kind of the operands; None for several kinds."""
    kind = _only_kind(ins)
    return None if kind in (None, "max", "min") else Spread(kind, degree, zero)


def _select(terms: Sequence[Spread], others: Sequence[Spread]) -> bool:
    """Returns whether other operands only select among terms: by the same numbers in all parts, or
    row by row in terms with rows."""
    sums = any(x.kind == "sum" for x in terms)
    return all(x.plain and not (sums and x.kind == "rows") for x in others)


def _fills(operation: Operation) -> bool:
    """Returns whether a gather may put in a number for what is out of bounds: neither 0, whose sum
    over parts is 0, nor NaN."""
    if operation.name != "gather" or operation.params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return False
    fill = operation.params["fill_value"]
    return _is_integer(operation) if fill is None else bool(fill != 0)


def _keeps_numbers(operation: Operation) -> bool:
    """Returns whether an operation rounds no number to an integer, a truth value or fewer bits in
    which it wraps around."""
    old, new = operation.invars[0].aval.dtype, operation.outvars[0].aval.dtype
    if old == new:
        return True
    if old.kind in "iu" and new.kind in "iu":
        return new.itemsize >= old.itemsize
    return new.kind != "b" and (old.kind in "iu" or not _is_integer(operation))


def _is_integer(operation: Operation) -> bool:
    return not jnp.issubdtype(operation.outvars[0].aval.dtype, jnp.inexact)


def of_rows(
    operation: Operation,
    ins: Sequence[Spread],
    row_dims: Sequence[int | None],
    result_dims: Sequence[int | None],
) -> Spread:
    """Returns the relation of the results of an operation on rows. `row_dims` are the dims of the
    rows in the operands, None for operands without rows, and `result_dims` those in the results."""
    mixed = lost(f"rows of the batch may meet in {operation.name} at {source_of(operation)}")
    factors = factors_of(operation)
    if factors is None or any(x.kind in ("sum", "max", "min") for x in ins):
        return mixed
    pairs = zip(factors.operands, row_dims, strict=True)
    cut = {dims[row] for dims, row in pairs if row is not None}
    if not cut:
        return _made(operation, ins, result_dims) or mixed
    factor = next(iter(cut))
    others = zip(factors.operands, row_dims, strict=True)
    if len(cut) > 1 or factor is None or any(factor in x for x, row in others if row is None):
        return mixed
    if operation.name.startswith("scatter") and factor not in factors.operands[2]:
        return mixed  # The rows are indexed, and each part counts its own from 0.
    if factor in factors.reduced:
        return _reduced(operation, ins, factors, factor) or mixed
    for dims, row in zip(factors.results, result_dims, strict=True):
        if row is None or dims[row] != factor:
            return mixed
    return of_result(operation, ins) or mixed


def _made(
    operation: Operation, ins: Sequence[Spread], result_dims: Sequence[int | None]
) -> Spread | None:
    """Returns the relation of rows that are made equal: of a number, or of numbers along another
    dim."""
    (row,) = result_dims if len(result_dims) == 1 else (None,)
    if operation.name == "broadcast_in_dim" and row is not None and ins[0].kind == "same":
        return dataclasses.replace(ins[0], kind="rows")
    if operation.name == "iota" and row is not None and operation.params["dimension"] != row:
        return ROWS
    return None


def _reduced(
    operation: Operation, ins: Sequence[Spread], factors: Factors, factor: int
) -> Spread | None:
    """Returns the relation of results in which the rows are summed, or the largest is taken."""
    name = operation.name
    if name in _EXTREMES:
        return Spread(_EXTREMES[name]) if ins[0].plain else None
    if name not in _SUMMING or factors.reduced[factor] != "sum":
        return None
    if _is_integer(operation) and operation.outvars[0].aval.dtype.itemsize < _WIDE_BYTES:
        return None  # A sum that wraps around in the whole, and not in its parts.
    if name in _ADDS_AT:  # The operand would count once for each part.
        return Spread("sum", ins[2].degree) if ins[0].zero and ins[1].plain else None
    return Spread("sum", sum(x.degree for x in ins))
