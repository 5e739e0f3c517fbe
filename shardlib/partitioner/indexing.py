"""Factors of lookups and updates at indices."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from shardlib.partitioner.factors import Cut, Dim, Factors, bind, pieces, rule
from shardlib.partitioner.shapes import same_dims


@rule("dynamic_slice")
def dynamic_slice(equation: Any) -> Factors:
    """A dim that is taken whole is a factor: its start is then 0 whatever the index is.

    Starts are clamped here, as the operation does: XLA of jax before 0.12 omits the clamp if a
    piece of the result is sliced next.
    """
    sizes, whole = equation.params["slice_sizes"], equation.invars[0].aval.shape
    rank = len(sizes)
    found = same_dims(_first(equation, 1), ())
    dims = found.operands[0]

    def local(equation: Any, values: list[Any], cut: Cut) -> Any:
        x, *starts = values[0], *map(_wide, values[1:])
        room = (n - size for n, size in zip(whole, sizes, strict=True))
        starts = [
            jnp.clip(s, 0, most).astype(s.dtype) for s, most in zip(starts, room, strict=True)
        ]
        return bind(equation, [x, *starts], slice_sizes=pieces(sizes, dims, cut))

    return Factors((dims, *[()] * rank), found.results, found.sizes, local=local)


@rule("dynamic_update_slice")
def dynamic_update_slice(equation: Any) -> Factors:
    found = same_dims(_first(equation, 2), ())
    rest = [()] * (len(equation.invars) - 2)
    return Factors((*found.operands, *rest), found.results, found.sizes)


class _first:
    """An equation with its first operands alone: the index operands after them are scalars."""

    def __init__(self, equation: Any, count: int):
        self.invars, self.outvars = equation.invars[:count], equation.outvars


def _wide(at: Any) -> Any:
    """Returns indices in a dtype that can hold the starts of pieces: 8 and 16 bits may not."""
    return at.astype(jnp.int32) if at.dtype.itemsize < 4 else at


class _Factory:
    """Numbers factors in the order of their creation."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1


@rule("gather")
def gather(equation: Any) -> Factors:
    """Dims of the indices are factors, as are operand dims that are taken whole.

    A table with lookups along one dim may be cut along it: every device looks up its own rows, with
    zeros for others, and the results are summed.
    """
    params = equation.params
    numbers, taken = params["dimension_numbers"], params["slice_sizes"]
    operand, indices = (var.aval.shape for var in equation.invars)
    out = equation.outvars[0].aval
    factory = _Factory()
    table: list[Dim] = [None] * len(operand)
    index: list[Dim] = [None] * len(indices)
    result: list[Dim] = [None] * len(out.shape)
    looped = [dim for dim in range(len(out.shape)) if dim not in numbers.offset_dims]
    for at, dim in enumerate(looped):
        index[at] = result[dim] = factory.new(indices[at])
    batch = numbers.operand_batching_dims
    for dim, at in zip(batch, numbers.start_indices_batching_dims, strict=True):
        table[dim] = index[at]
    kept = [d for d in range(len(operand)) if d not in (*numbers.collapsed_slice_dims, *batch)]
    for to, dim in zip(numbers.offset_dims, kept, strict=True):
        if taken[dim] == operand[dim]:
            table[dim] = result[to] = factory.new(taken[dim])
    row = _looked_up(numbers, indices)
    if row is not None and jnp.issubdtype(out.dtype, jnp.number):
        table[row] = factory.new(operand[row])

    def local(equation: Any, values: list[Any], cut: Cut) -> Any:
        size = [
            n if dim in numbers.collapsed_slice_dims or dim in batch else n // cut.parts(table[dim])
            for dim, n in enumerate(taken)
        ]
        if row is None or cut.parts(table[row]) == 1:
            return bind(equation, values, slice_sizes=tuple(size))
        return [_rows_here(equation, values, tuple(size), row, operand[row], table, cut, looped)]

    sums = {} if row is None or table[row] is None else {table[row]: "sum"}
    return Factors(
        (tuple(table), tuple(index)),
        (tuple(result),),
        tuple(factory.sizes),
        sums,  # type: ignore[arg-type]
        flops=float(math.prod(out.shape)),
        local=local,
    )


def _looked_up(numbers: Any, indices: tuple[int, ...]) -> int | None:
    """Returns the operand dim of which each index takes one element."""
    starts = tuple(numbers.start_index_map)
    if len(starts) != 1 or tuple(numbers.collapsed_slice_dims) != starts or indices[-1] != 1:
        return None
    return starts[0]


def _rows_here(
    equation: Any,
    values: list[Any],
    size: tuple[int, ...],
    row: int,
    num_rows: int,
    table: list[Dim],
    cut: Cut,
    looped: list[int],
) -> Any:
    """Looks up the rows of this piece of the table, with zeros for rows of other pieces."""
    x, at = values[0], _wide(values[1])
    mode = equation.params["mode"]
    if mode == GatherScatterMode.CLIP:
        at = jnp.clip(at, 0, num_rows - 1)
    here = at - (cut.index(table[row]) * x.shape[row]).astype(at.dtype)
    mine = (here >= 0) & (here < x.shape[row])
    safe = jnp.clip(here, 0, x.shape[row] - 1)
    (rows,) = bind(
        equation,
        [x, safe],
        slice_sizes=size,
        mode=GatherScatterMode.CLIP,
        fill_value=None,
        unique_indices=False,
        indices_are_sorted=False,
    )
    found = jnp.where(lax.broadcast_in_dim(mine[..., 0], rows.shape, looped), rows, 0)
    if mode != GatherScatterMode.FILL_OR_DROP:
        return found
    # One device adds the fill value for an index outside of the whole table.
    outside = (at < 0) | (at >= num_rows)
    is_first = cut.index(table[row]) == 0
    fill = _fill_value(equation.params["fill_value"], rows.dtype)
    stands = lax.broadcast_in_dim(outside[..., 0] & is_first, rows.shape, looped)
    return jnp.where(stands, fill, found)


def _fill_value(given: Any, dtype: Any) -> Any:
    """Returns JAX's fill value for an index out of bounds: NaN, or the extreme integer."""
    if given is not None:
        return jnp.asarray(given, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    extreme = jnp.iinfo(dtype)
    return jnp.asarray(extreme.min if extreme.min < 0 else extreme.max, dtype)


@rule(*(f"scatter{dash}{kind}" for dash in "-_" for kind in ("add", "sub")))
def scatter_add(equation: Any) -> Factors:
    """Updates are contracted: each device adds its own, onto the operand on one of them.

    The operand may be cut along a dim of which each index takes one element: each device adds the
    rows that it holds and drops the others.
    """
    return _scatter(equation, adds=True)


@rule("scatter", *(f"scatter{dash}{kind}" for dash in "-_" for kind in ("mul", "min", "max")))
def scatter(equation: Any) -> Factors:
    """Updates are whole except along window and batching dims: their order may matter."""
    return _scatter(equation, adds=False)


def _scatter(equation: Any, *, adds: bool) -> Factors:
    numbers = equation.params["dimension_numbers"]
    operand, indices, updates = (var.aval.shape for var in equation.invars)
    dtype = equation.outvars[0].aval.dtype
    factory = _Factory()
    target: list[Dim] = [None] * len(operand)
    index: list[Dim] = [None] * len(indices)
    update: list[Dim] = [None] * len(updates)
    batching = numbers.scatter_indices_batching_dims
    looped = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    sums = {}
    for at, dim in enumerate(looped):
        if at in batching or adds:
            index[at] = update[dim] = factory.new(indices[at])
        if adds and at not in batching:
            sums[index[at]] = "sum"
    for dim, at in zip(numbers.operand_batching_dims, batching, strict=True):
        target[dim] = index[at]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(operand)) if dim not in gone]
    for at, dim in zip(numbers.update_window_dims, kept, strict=True):
        if updates[at] == operand[dim]:
            target[dim] = update[at] = factory.new(operand[dim])
    row = _updated_row(numbers, indices) if adds else None
    if row is not None:
        target[row] = factory.new(operand[row])

    def local(equation: Any, values: list[Any], cut: Cut) -> Any:
        x, at, new = values
        for factor in sums:
            if cut.parts(factor) > 1:
                # The operand counts once in the sum: on the first device along the factor.
                x = jnp.where(cut.index(factor) == 0, x, jnp.zeros((), dtype))
        if row is None or cut.parts(target[row]) == 1:
            return bind(equation, [x, at, new])
        at = _wide(at)
        if equation.params["mode"] == GatherScatterMode.CLIP:
            at = jnp.clip(at, 0, operand[row] - 1)
        here = at - (cut.index(target[row]) * x.shape[row]).astype(at.dtype)
        mine = (here >= 0) & (here < x.shape[row])
        here = jnp.where(mine, here, x.shape[row])
        promises = {"unique_indices": False, "indices_are_sorted": False}
        return bind(equation, [x, here, new], mode=GatherScatterMode.FILL_OR_DROP, **promises)

    return Factors(
        (tuple(target), tuple(index), tuple(update)),
        (tuple(target),),
        tuple(factory.sizes),
        sums,  # type: ignore[arg-type]
        flops=float(math.prod(updates)),
        local=local,
    )


def _updated_row(numbers: Any, indices: tuple[int, ...]) -> int | None:
    """Returns the operand dim of which each index updates one element."""
    rows = tuple(numbers.scatter_dims_to_operand_dims)
    if len(rows) != 1 or tuple(numbers.inserted_window_dims) != rows or indices[-1] != 1:
        return None
    return rows[0]
