"""Layout rules by primitive: from the layouts of operands to the layouts of results."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr

from shardlib.cost.traced.attention import attended
from shardlib.cost.traced.layout import (
    MICRO,
    Aval,
    Axes,
    Contraction,
    Equation,
    Spec,
    Spreading,
    ValueSharding,
    contracted,
    merged,
    nbytes,
    replicated,
    reshaped,
)
from shardlib.jaxprs import equations
from shardlib.sharding.shared_rows import OPAQUE

Shardings = list[ValueSharding]
Rule = Callable[[Spreading, Equation, Shardings], Shardings]
LINEAR = frozenset(
    ("convert_element_type", "neg", "transpose", "reshape", "copy", "reduce_sum", "squeeze")
)
"""Operations that may be applied to summands before they are summed."""


def results(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    """Returns the layouts of the results of an equation without an inner program, and records the
    collectives that it needs.
    """
    layouts = RULES.get(equation.primitive.name, _elementwise)(spread, equation, shardings)
    widths = [laid.width for laid in shardings if laid.partial]
    return [
        _fitted(spread, var.aval, one, widths) if hasattr(var.aval, "shape") else one
        for var, one in zip(equation.outvars, layouts, strict=True)
    ]


def _fitted(
    spread: Spreading, aval: Aval, laid: ValueSharding, widths: Sequence[int]
) -> ValueSharding:
    width = 0
    if laid.partial:
        width = widths[0] if widths else aval.dtype.itemsize
    return ValueSharding(spread.fitting(aval.shape, laid.spec), laid.partial, laid.is_param, width)


def keeps_summands(equation: Equation, shardings: Sequence[ValueSharding]) -> bool:
    """Returns whether an equation may be applied to summands before they are summed."""
    name = equation.primitive.name
    if name in LINEAR:
        return True
    partial = [i for i, laid in enumerate(shardings) if laid.partial]
    if len(partial) == 1 and (name == "mul" or (name == "div" and partial == [0])):
        others = [v for i, v in enumerate(equation.invars) if i not in partial]
        return all(math.prod(v.aval.shape) == 1 for v in others)
    if name == "add_any":
        return len({laid.partial for laid in shardings}) == 1
    return name == "sharding_constraint"


def product_layout(
    spread: Spreading, equation: Equation, shardings: list[ValueSharding]
) -> tuple[ValueSharding, tuple[ValueSharding, ValueSharding]]:
    """Returns the layout of a `dot_general` or convolution, and the layouts in which it takes its
    operands."""
    avals = [v.aval for v in equation.invars[:2]]
    rank = len(equation.outvars[0].aval.shape)
    if equation.primitive.name == "dot_general":
        dims, batch = equation.params["dimension_numbers"]
        dot = Contraction(dims, batch, _dot_places(avals, dims, batch), rank)
        return contracted(spread, avals, shardings[:2], dot)
    numbers = equation.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups = equation.params["feature_group_count"] * equation.params["batch_group_count"]
    # A window slides over spatial dims, so they are whole here.
    shardings = [
        spread.relaid(aval, laid, _without(laid.spec, numbered[2:]))
        for aval, laid, numbered in zip(avals, shardings, (lhs, rhs), strict=True)
    ]
    dims = ((lhs[1],), (rhs[1],)) if groups == 1 else ((), ())
    places = ({lhs[0]: out[0]}, {rhs[0]: out[1]} if groups == 1 else {})
    window = Contraction(dims, ((), ()), lambda i, dim: places[i].get(dim), rank)
    return contracted(spread, avals, shardings, window)


def result_dims(equation: Equation) -> list[dict[int, int]]:
    """Returns for each operand of a `dot_general` the dims that its result has, by its own dim;
    none for other products."""
    if equation.primitive.name != "dot_general":
        return [{}, {}]
    avals = [v.aval for v in equation.invars[:2]]
    dims, batch = equation.params["dimension_numbers"]
    place = _dot_places(avals, dims, batch)
    found = [{d: place(i, d) for d in range(len(aval.shape))} for i, aval in enumerate(avals)]
    return [{dim: at for dim, at in one.items() if at is not None} for one in found]


def _dot_places(
    avals: Sequence[Aval], dims: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
) -> Callable[[int, int], int | None]:
    places: list[dict[int, int]] = [{}, {}]
    for where, (a, b) in enumerate(zip(*batch, strict=True)):
        places[0][a], places[1][b] = where, where
    where = len(batch[0])
    for i in (0, 1):
        for dim in range(len(avals[i].shape)):
            if dim not in dims[i] and dim not in batch[i]:
                places[i][dim] = where
                where += 1
    return lambda i, dim: places[i].get(dim)


def _without(spec: Sequence[Axes], dims: Sequence[int]) -> tuple[Axes, ...]:
    return tuple(() if dim in dims else axes for dim, axes in enumerate(spec))


def _product(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    return [product_layout(spread, equation, shardings)[0]]


def _elementwise(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    """Returns the layouts of an elementwise operation. A result of any shape keeps the sharding of
    dims that an operand has in the same place."""
    avals = [v.aval for v in equation.invars]
    arrays = [
        (a, laid)
        for a, laid in zip(avals, shardings, strict=True)
        if len(getattr(a, "shape", ())) > 0
    ]
    only = len(arrays) == 1 and arrays[0][1].is_param
    partial = shardings[0].partial if equation.primitive.name in LINEAR else _partial_of(shardings)
    results: list[ValueSharding] = []
    for out in (v.aval for v in equation.outvars):
        shape = getattr(out, "shape", ())
        same = [(a, laid) for a, laid in arrays if len(a.shape) == len(shape)]
        if not same:
            results.append(replicated(out))
            continue
        spec = same[0][1].spec
        if any(a.shape != shape or laid.spec != spec for a, laid in same):
            spec = _led(spread, same, out, moves=not results)
        results.append(ValueSharding(spec, partial, only))
    return results


def _led(
    spread: Spreading, operands: Sequence[tuple[Any, ValueSharding]], out: Aval, *, moves: bool
) -> Spec:
    """Returns the layout of a result whose operands differ in layout or shape."""
    kept = []
    for aval, laid in operands:
        pairs = zip(laid.spec, aval.shape, out.shape, strict=True)
        spec = tuple(axes if size in (wanted, 1) else () for axes, size, wanted in pairs)
        kept.append(ValueSharding(spec, (), laid.is_param))
        if moves:
            spread.relaid(aval, ValueSharding(laid.spec, (), laid.is_param), spec)
    return merged(spread, [aval for aval, _ in operands], kept, out).spec


def _partial_of(shardings: Sequence[ValueSharding]) -> Axes:
    """Returns the pending summand axes. After `keeps_summands` only a linear operation has any."""
    return next((laid.partial for laid in shardings if laid.partial), ())


def _broadcast(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    out, dims = equation.outvars[0].aval, equation.params["broadcast_dimensions"]
    spec: list[Axes] = [()] * len(out.shape)
    for dim, where in enumerate(dims):
        if equation.invars[0].aval.shape[dim] == out.shape[where]:
            spec[where] = shardings[0].spec[dim]
    return [ValueSharding(tuple(spec), shardings[0].partial)]


def _reshape(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    old, out = equation.invars[0].aval, equation.outvars[0].aval
    laid = shardings[0]
    spec = reshaped(spread, old.shape, laid, out.shape)
    kept = {axis for axes in spec for axis in axes}
    if any(axis not in kept for axis in laid.axes):
        lost = tuple(tuple(a for a in axes if a in kept) for axes in laid.spec)
        laid = spread.relaid(old, laid, lost)
        spec = reshaped(spread, old.shape, laid, out.shape)
    return [ValueSharding(spec, laid.partial, laid.is_param)]


def _transpose(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    laid = shardings[0]
    spec = tuple(laid.spec[dim] for dim in equation.params["permutation"])
    return [ValueSharding(spec, laid.partial, laid.is_param)]


def _squeeze(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    gone, laid = equation.params["dimensions"], shardings[0]
    spec = tuple(axes for dim, axes in enumerate(laid.spec) if dim not in gone)
    return [ValueSharding(spec, laid.partial, laid.is_param)]


def _reduce(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    dims = equation.params.get("axes", ())
    results = []
    for var, laid in zip(equation.outvars, shardings, strict=False):
        spec = tuple(axes for dim, axes in enumerate(laid.spec) if dim not in dims)
        over = tuple(a for dim in dims for a in laid.spec[dim] if a != MICRO)
        result = ValueSharding(spec, tuple(dict.fromkeys((*laid.partial, *over))))
        is_sum = equation.primitive.name == "reduce_sum"
        results.append(result if is_sum else spread.whole(var.aval, result))
    return results + [replicated(v.aval) for v in equation.outvars[len(results) :]]


def _gather(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    """Lays out a lookup at its indices. A table sharded along the looked-up dim gives zeros for
    rows that another device holds, to be summed."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    table, indices = (v.aval for v in equation.invars[:2])
    out = equation.outvars[0].aval
    spec: list[Axes] = [()] * len(out.shape)
    batch_dims = [d for d in range(len(out.shape)) if d not in numbers.offset_dims]
    used: set[str] = set()
    for where, axes in zip(batch_dims, shardings[1].spec[: len(indices.shape) - 1], strict=False):
        spec[where] = axes
        used.update(axes)
    gone = (*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ()))
    kept_dims = [d for d in range(len(table.shape)) if d not in gone]
    partial: list[str] = []
    want = list(shardings[0].spec)
    for dim, axes in enumerate(shardings[0].spec):
        free = tuple(a for a in axes if a not in used)
        if dim in kept_dims and sizes[dim] == table.shape[dim]:
            spec[numbers.offset_dims[kept_dims.index(dim)]] = free
        else:
            partial += [a for a in free if a != MICRO]
        want[dim] = free
        used.update(free)
    spread.relaid(table, shardings[0], tuple(want))
    return [ValueSharding(tuple(spec), tuple(partial))]


def _scatter(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    """Lays out a scatter. Updates sharded where the operand is not become summands of the
    result."""
    operand, updates = equation.invars[0].aval, equation.invars[2].aval
    numbers = equation.params["dimension_numbers"]
    spec = list(shardings[0].spec)
    kept = [
        d
        for d in range(len(operand.shape))
        if d not in numbers.inserted_window_dims
        and d not in getattr(numbers, "operand_batching_dims", ())
    ]
    for window, dim in zip(numbers.update_window_dims, kept, strict=False):
        if updates.shape[window] == operand.shape[dim] and not spec[dim]:
            spec[dim] = shardings[2].spec[window]
    pairs = zip(
        getattr(numbers, "operand_batching_dims", ()),
        getattr(numbers, "scatter_indices_batching_dims", ()),
        strict=True,
    )
    for dim, where in pairs:
        spec[dim] = spec[dim] or shardings[1].spec[where]
    used = {axis for axes in spec for axis in axes}
    over = [
        axis
        for dim, axes in enumerate(shardings[2].spec)
        if dim not in numbers.update_window_dims
        for axis in axes
        if axis != MICRO and axis not in used
    ]
    return [ValueSharding(tuple(spec), tuple(over))]


def _constraint(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
    aval, laid = equation.invars[0].aval, shardings[0]
    names, kind = logical_axes_of(equation)
    if names is None:
        return [spread.whole(aval, laid)]
    spec = spread.resolve(names, tuple(aval.shape), kind)
    # Rules never shard in time, so a constraint leaves `MICRO` in place.
    in_time = [dim for dim, axes in enumerate(laid.spec) if MICRO in axes]
    spec = tuple(
        (*axes, MICRO) if dim in in_time and MICRO not in axes else axes
        for dim, axes in enumerate(spec)
    )
    # Sums over other axes may wait: compilers turn a sum of which each device then takes its part
    # into a reduce-scatter.
    spec = spread.fitting(aval.shape, spec)
    wanted = {axis for axes in spec for axis in axes}
    waiting = tuple(axis for axis in laid.partial if axis not in wanted)
    now = tuple(axis for axis in laid.partial if axis in wanted)
    relaid = spread.relaid(aval, dataclasses.replace(laid, partial=now), spec)
    return [ValueSharding(relaid.spec, waiting, relaid.is_param)]


PARAMS_TABLE = "params of "
"""Prefix of the logical axis of a constraint that the parameter table decides."""


def constrained_names(jaxpr: Jaxpr) -> set[str]:
    """Returns the logical axes named by a program that was traced on a mesh of logical axes."""
    logical_axes: set[str] = set()
    for equation, _ in equations(jaxpr):
        if equation.primitive.name == "sharding_constraint":
            names, _ = logical_axes_of(equation)
            logical_axes |= {name for name in names or () if name}
    return logical_axes


def logical_axes_of(equation: Equation) -> tuple[tuple[str | None, ...] | None, str]:
    """Returns the logical axes and the table of a constraint traced on a mesh of logical axes."""
    aval: Any = equation.outvars[0].aval
    spec, rank = getattr(equation.params["sharding"], "spec", ()), len(aval.shape)
    names: list[str | None] = []
    kind = "activations"
    for entry in (*spec, *(None,) * (rank - len(spec))):
        if isinstance(entry, tuple):
            entry = entry[0] if entry else None
        if entry is not None and not isinstance(entry, str):
            return None, kind
        if entry is not None and entry.startswith(PARAMS_TABLE):
            entry, kind = entry.removeprefix(PARAMS_TABLE), "params"
        names.append(entry)
    return tuple(names), kind


def _collective(kind: str) -> Rule:
    """Returns the rule of a collective that a program of one device calls by name."""

    def rule(spread: Spreading, equation: Equation, shardings: Shardings) -> Shardings:
        params = equation.params
        axes = params["axes"] if "axes" in params else params["axis_name"]
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        buffers = equation.outvars if kind == "all_gather" else equation.invars
        for buffer, laid in zip(buffers, shardings, strict=True):
            spread.send(kind, axes, nbytes(buffer.aval), of_param=laid.is_param)
        pairs = zip(equation.outvars, shardings, strict=True)
        return [dataclasses.replace(replicated(v.aval), is_param=x.is_param) for v, x in pairs]

    return rule


COLLECTIVES: dict[str, Rule] = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), _collective("all_reduce")),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _collective("all_gather")),
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), _collective("reduce_scatter")),
    "all_to_all": _collective("all_to_all"),
}
"""Rules of collectives between the programs of single devices."""
REDUCTIONS = (
    *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and"),
    *("reduce_xor", "argmax", "argmin"),
)
RULES: dict[str, Rule] = {
    "dot_general": _product,
    "conv_general_dilated": _product,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    **dict.fromkeys(REDUCTIONS, _reduce),
    "gather": _gather,
    **dict.fromkeys(("scatter-add", "scatter_add", "scatter"), _scatter),
    "sharding_constraint": _constraint,
    OPAQUE: attended,
    **COLLECTIVES,
}
"""Layout rules of the primitives that are not elementwise."""
