"""Proof that the results of a program over a batch are sums over its rows.

A program is traced for a whole batch and for one of n equal parts of its rows. Both traces are
walked side by side. The dims whose sizes differ are the rows, and constants that differ by a factor
of n, such as the count in a mean, are known as such. `spread` says what each operation does to the
relation between the values of the whole and of the parts. What it does not know is lost, with
everything computed from it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.source_info_util import summarize

from shardlib.jaxprs import Atom, FlatProgram, Operation, Value, flatten, is_literal, scan_parts
from shardlib.partitioner.analyze import is_unsupported
from shardlib.partitioner.entry import Traced
from shardlib.partitioner.program import source_of
from shardlib.partitioner.spread import (
    KEY,
    ROWS,
    SAME,
    ZERO,
    Spread,
    first_lost,
    joined,
    lost,
    of_result,
    of_rows,
)
from shardlib.sharding.shared_rows import OPAQUE

_MAX_TRIPS = 6
_DRAWS = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator"})
# Parameters that hold a size, which is larger in the whole.
_SIZES = frozenset({"new_sizes", "shape", "limit_indices", "slice_sizes"})
_IGNORED = frozenset({"update_jaxpr", "update_consts"})
_DIFFERS = lost("the loss computes fewer rows in another way")


def spreads(whole: Traced, part: Traced, inputs: Sequence[Spread], parts: int) -> list[Spread]:
    """Returns how each result for a whole batch follows from the results for its parts. `part` is
    the function traced for one of the parts; `inputs` are the relations of the leaves of the
    arguments."""
    return _Walk(parts).closed(whole.closed, part.closed, inputs)


class _Walk:
    def __init__(self, parts: int):
        self.parts = parts

    def closed(
        self, whole: ClosedJaxpr, part: ClosedJaxpr, inputs: Sequence[Spread]
    ) -> list[Spread]:
        if len(whole.consts) != len(part.consts):
            return [_DIFFERS] * len(whole.jaxpr.outvars)
        pairs = zip(whole.consts, part.consts, strict=True)
        consts = [self._constant(one, two) for one, two in pairs]
        return self.jaxpr(whole.jaxpr, part.jaxpr, [*consts, *inputs])

    def jaxpr(self, whole: Jaxpr, part: Jaxpr, inputs: Sequence[Spread]) -> list[Spread]:
        one, two = flatten(whole), flatten(part)
        if _counts(one) != _counts(two):
            return [_DIFFERS] * len(one.outvars)
        return self._flat(one, two, inputs)

    def _flat(self, one: FlatProgram, two: FlatProgram, inputs: Sequence[Spread]) -> list[Spread]:
        at: dict[Atom, Spread] = dict(zip(one.invars, inputs, strict=True))
        twin: dict[Atom, Atom] = dict(zip(one.invars, two.invars, strict=True))

        def read(a: Atom, b: Atom) -> Spread:
            if is_literal(a):
                return self._constant(a.val, b.val) if is_literal(b) else _DIFFERS
            if a not in at and isinstance(a, Value) and isinstance(b, Value):
                return self._constant(a.const, b.const)  # captured by an inner call
            return at[a] if twin.get(a) is b else _DIFFERS

        for whole, part in zip(one.operations, two.operations, strict=True):
            if len(whole.invars) != len(part.invars) or len(whole.outvars) != len(part.outvars):
                return [_DIFFERS] * len(one.outvars)
            ins = [read(a, b) for a, b in zip(whole.invars, part.invars, strict=True)]
            at.update(zip(whole.outvars, self._step(whole, part, ins), strict=True))
            twin.update(zip(whole.outvars, part.outvars, strict=True))
        return [read(a, b) for a, b in zip(one.outvars, two.outvars, strict=True)]

    def _step(self, whole: Operation, part: Operation, ins: list[Spread]) -> list[Spread]:
        count = len(whole.outvars)
        if whole.name == part.name == OPAQUE:
            return self._shared(whole, part, ins)
        if whole.name != part.name or not self._alike(whole, part):
            return [lost(f"{_DIFFERS.why} at {source_of(whole)}")] * count
        if is_unsupported(whole) or whole.name == "sharding_constraint":
            return [lost(f"the loss holds {whole.name} at {source_of(whole)}")] * count
        if whole.name in _LOOPS:
            return _LOOPS[whole.name](self, whole, part, ins)
        if whole.name == "optimization_barrier":
            return ins
        gone = first_lost(ins)
        if gone is not None:
            return [_of_key(whole, gone) if gone.why.startswith(KEY) else gone] * count
        dims = [self._row_dims(a, b) for a, b in zip(whole.invars, part.invars, strict=True)]
        made = [self._row_dims(a, b) for a, b in zip(whole.outvars, part.outvars, strict=True)]
        if any(len(x) > 1 for x in (*dims, *made)):
            return [
                lost(f"rows of the batch may meet in {whole.name} at {source_of(whole)}")
            ] * count
        if not any((*dims, *made)):
            result = of_result(whole, ins)
            here = f"a sum over rows enters {whole.name} at {source_of(whole)}"
            return [result or lost(here)] * count
        return [of_rows(whole, ins, [_only(x) for x in dims], [_only(x) for x in made])] * count

    def _shared(self, whole: Operation, part: Operation, ins: list[Spread]) -> list[Spread]:
        """Returns the relation of the results of an operation that exchanges parts of rows itself:
        it gives each part what it gives the whole, if every operand is cut alike."""
        count, what = len(whole.outvars), whole.params["what"]
        gone = first_lost(ins)
        if gone is not None:
            return [gone] * count
        results = list(zip(whole.outvars, part.outvars, strict=True))
        arrays = [*zip(whole.invars, part.invars, strict=True), *results]
        _, dim = what
        cut = all(
            self._row_dims(a, b) == ([dim] if len(a.aval.shape) > 1 else []) for a, b in arrays
        )
        # The last operand of a derivative is a gradient, in which it is linear.
        fixed, degree = (ins[:-1], ins[-1].degree) if whole.params["linear"] else (ins, 0)
        if what != part.params["what"] or not cut or not all(x.plain for x in fixed):
            return [lost(f"positions of a row may meet at {source_of(whole)}")] * count
        kinds = ["rows" if len(a.aval.shape) > 1 else "sum" for a, _ in results]
        return [Spread(kind, degree) for kind in kinds]  # type: ignore[arg-type]

    def _row_dims(self, whole: Atom, part: Atom) -> Sequence[int | None]:
        """Returns the dims whose sizes differ; several for shapes that do not match."""
        a, b = whole.aval, part.aval
        if len(a.shape) != len(b.shape) or a.dtype != b.dtype:
            return (None, None)
        pairs = [(dim, x, y) for dim, (x, y) in enumerate(zip(a.shape, b.shape, strict=True))]
        differing = [(dim, x, y) for dim, x, y in pairs if x != y]
        if any(x != y * self.parts for _, x, y in differing):
            return (None, None)
        return [dim for dim, _, _ in differing]

    def _alike(self, whole: Operation, part: Operation) -> bool:
        """Returns whether two operations differ at most in the sizes of their operands."""
        one, two = whole.params, part.params
        if one.keys() != two.keys() or not (_replaces(whole) and _replaces(part)):
            return False
        is_loop = whole.name in _LOOPS  # whose programs are walked
        return all(
            key in _IGNORED or (is_loop and _is_program(x)) or self._equal(key, x, two[key])
            for key, x in one.items()
        )

    def _equal(self, key: str, one: Any, two: Any) -> bool:
        if key not in _SIZES or len(one or ()) != len(two or ()):
            is_nan = isinstance(one, float) and one != one and two != two
            return not isinstance(one, np.ndarray | jax.Array) and bool(is_nan or one == two)
        return all(x in (y, y * self.parts) for x, y in zip(one or (), two or (), strict=True))

    def _constant(self, one: Any, two: Any) -> Spread:
        """Returns the relation of a constant of the whole to the one of a part."""
        if one is None or two is None:
            return _DIFFERS
        if one is two and np.ndim(one):
            return SAME
        if all(getattr(x, "dtype", None) == jax.dtypes.float0 for x in (one, two)):
            return ZERO if np.shape(one) == np.shape(two) else dataclasses.replace(ROWS, zero=True)
        if not (_is_number(one) and _is_number(two)):
            return _DIFFERS
        a, b = _widened(one), _widened(two)
        if a.shape != b.shape or a.dtype != b.dtype:
            return _DIFFERS
        if np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            return SAME if a.any() else ZERO
        for degree in (1, -1):
            # A count may be rounded to the precision of float32.
            if np.allclose(a, b * float(self.parts) ** degree, rtol=1e-6, atol=0):
                return Spread("same", degree)
        return _DIFFERS


def _replaces(operation: Operation) -> bool:
    """Returns whether an operation is not `x.at[i].apply(f)`, whose function may hold a size."""
    update = operation.params.get("update_jaxpr") if operation.name == "scatter" else None
    return update is None or update.outvars[0] is update.invars[1]


def _counts(flat: FlatProgram) -> tuple[int, int, int]:
    return len(flat.invars), len(flat.operations), len(flat.outvars)


def _is_number(x: Any) -> bool:
    """Returns whether a constant has a value here that can be compared."""
    is_traced = isinstance(x, jax.core.Tracer)  # type: ignore[attr-defined]
    if is_traced:
        return False
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, np.bool) or jnp.issubdtype(dtype, np.number)


def _widened(x: Any) -> np.ndarray:
    """Returns a constant as a NumPy array, with 8-bit and 16-bit floats in float32."""
    array = np.asarray(x)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _only(dims: Sequence[int | None]) -> int | None:
    return dims[0] if dims else None


def _of_key(operation: Operation, key: Spread) -> Spread:
    """Returns the relation of what follows from a key, with the last line that JAX recorded."""
    if summarize(operation.equation.source_info):
        key = lost(f"{KEY} at {source_of(operation)}")
    drawn = "the loss draws random numbers"
    return lost(key.why.replace(KEY, drawn)) if operation.name in _DRAWS else key


def _is_program(value: object) -> bool:
    values = value if isinstance(value, tuple | list) else (value,)
    return any(hasattr(getattr(x, "jaxpr", x), "eqns") for x in values)


def _scan(walk: _Walk, whole: Operation, part: Operation, ins: list[Spread]) -> list[Spread]:
    num_consts, num_carry = scan_parts(whole)
    start = num_consts + num_carry
    pairs = zip(whole.invars[start:], part.invars[start:], strict=True)
    if scan_parts(part) != (num_consts, num_carry) or any(
        0 in walk._row_dims(a, b) for a, b in pairs
    ):
        why = lost(f"rows of the batch may meet in scan at {source_of(whole)}")
        return [why] * len(whole.outvars)
    bodies = whole.params["jaxpr"], part.params["jaxpr"]
    carry = list(ins[num_consts:start])

    def trip(carry: Sequence[Spread]) -> list[Spread]:
        return walk.closed(*bodies, [*ins[:num_consts], *carry, *ins[start:]])

    carry, outs = _fixpoint(trip, carry)
    return [*carry, *outs[num_carry:]]


def _while(walk: _Walk, whole: Operation, part: Operation, ins: list[Spread]) -> list[Spread]:
    params, others = whole.params, part.params
    num_cond = params["cond_nconsts"]
    start = num_cond + params["body_nconsts"]

    def trip(carry: Sequence[Spread]) -> list[Spread]:
        bodies = params["body_jaxpr"], others["body_jaxpr"]
        return walk.closed(*bodies, [*ins[num_cond:start], *carry])

    carry, _ = _fixpoint(trip, ins[start:])
    conditions = params["cond_jaxpr"], others["cond_jaxpr"]
    (goes_on,) = walk.closed(*conditions, [*ins[:num_cond], *carry])
    return carry if goes_on == SAME else [_decides(goes_on, whole)] * len(carry)


def _cond(walk: _Walk, whole: Operation, part: Operation, ins: list[Spread]) -> list[Spread]:
    if ins[0] not in (SAME, ZERO):
        return [_decides(ins[0], whole)] * len(whole.outvars)
    pairs = zip(whole.params["branches"], part.params["branches"], strict=True)
    branches = [walk.closed(one, two, ins[1:]) for one, two in pairs]
    return [_join(results, whole) for results in zip(*branches, strict=True)]


def _decides(spread: Spread, operation: Operation) -> Spread:
    if spread.kind == "lost":
        return spread
    return lost(f"rows of the batch decide together in {operation.name} at {source_of(operation)}")


def _join(results: Sequence[Spread], operation: Operation) -> Spread:
    here = lost(f"rows of the batch may meet in {operation.name} at {source_of(operation)}")
    return first_lost(results) or joined(results) or here


def _fixpoint(trip: Any, carry: Sequence[Spread]) -> tuple[list[Spread], list[Spread]]:
    """Returns the relations of a carry that holds before and after each trip, and of a trip."""
    carry = list(carry)
    for _ in range(_MAX_TRIPS):
        outs = trip(carry)
        after = [
            first_lost([old, new])
            or joined([old, new])
            or lost("rows of the batch may meet in a loop")
            for old, new in zip(carry, outs, strict=False)
        ]
        if after == carry:
            return carry, outs
        carry = after
    none = lost("a loop is too deep")
    return [none] * len(carry), [none] * len(outs)


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
