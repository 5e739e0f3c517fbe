"""Factors of lookups and updates at indices."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import GatherScatterMode

from shardlib.jaxprs import Operation
from shardlib.partitioner.factors import (
    Arrays,
    DevicePiece,
    Dim,
    FactorList,
    Factors,
    Reduction,
    bind,
    piece_shape,
    rule,
)
from shardlib.partitioner.shapes import same_dims


@rule("dynamic_slice")
def dynamic_slice(operation: Operation) -> Factors:
    """A dim that is taken whole is a factor: its start is then 0 whatever the index is.

    Starts are clamped here, as the operation does: XLA of jax before 0.12 omits the clamp if a
    piece of the result is sliced next.
    """
    sizes, whole = operation.params["slice_sizes"], operation.invars[0].aval.shape
    factors = same_dims(operation, ())

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        x, *starts = values[0], *map(_wide, values[1:])
        room = (n - size for n, size in zip(whole, sizes, strict=True))
        starts = [
            jnp.clip(s, 0, most).astype(s.dtype) for s, most in zip(starts, room, strict=True)
        ]
        slice_sizes = piece_shape(sizes, factors.operands[0], piece)
        return bind(operation, [x, *starts], slice_sizes=slice_sizes)

    return dataclasses.replace(factors, local=local)


@rule("dynamic_update_slice")
def dynamic_update_slice(operation: Operation) -> Factors:
    return same_dims(operation, ())


def _wide(at: jax.Array) -> jax.Array:
    """Returns indices in a dtype that can hold the starts of pieces: 8 and 16 bits may not."""
    return at.astype(jnp.int32) if at.dtype.itemsize < 4 else at


@rule("gather")
def gather(operation: Operation) -> Factors:
    """Dims of the indices are factors, as are operand dims that are taken whole.

    A table with lookups along one dim may be cut along it: every device looks up its own rows, with
    zeros for others, and the results are summed.
    """
    params = operation.params
    numbers, taken = params["dimension_numbers"], params["slice_sizes"]
    operand, indices = (var.aval.shape for var in operation.invars)
    out = operation.outvars[0].aval
    factors = FactorList()
    table: list[Dim] = [None] * len(operand)
    index: list[Dim] = [None] * len(indices)
    result: list[Dim] = [None] * len(out.shape)
    looped = [dim for dim in range(len(out.shape)) if dim not in numbers.offset_dims]
    for at, dim in enumerate(looped):
        index[at] = result[dim] = factors.new(indices[at])
    batch = numbers.operand_batching_dims
    for dim, at in zip(batch, numbers.start_indices_batching_dims, strict=True):
        table[dim] = index[at]
    gone = (*numbers.collapsed_slice_dims, *batch)
    kept = [dim for dim in range(len(operand)) if dim not in gone]
    for to, dim in zip(numbers.offset_dims, kept, strict=True):
        if taken[dim] == operand[dim]:
            table[dim] = result[to] = factors.new(taken[dim])
    row = _single_row(numbers.start_index_map, numbers.collapsed_slice_dims, indices)
    sums: dict[int, Reduction] = {}
    if row is not None and jnp.issubdtype(out.dtype, jnp.number):
        table[row] = factors.new(operand[row], sums)

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        # Of a collapsed or batching dim, each index takes one element.
        dims = [None if dim in gone else factor for dim, factor in enumerate(table)]
        size = piece_shape(taken, dims, piece)
        if row is None or piece.parts(table[row]) == 1:
            return bind(operation, values, slice_sizes=size)
        rows = _Rows(operation, row, operand[row], table[row], piece)
        x, at = values
        return [_looked_up(rows, x, at, size, looped)]

    return Factors(
        (tuple(table), tuple(index)),
        (tuple(result),),
        tuple(factors),
        sums,
        flops=float(math.prod(out.shape)),
        local=local,
    )


def _single_row(
    indexed: Sequence[int], dropped: Sequence[int], indices: tuple[int, ...]
) -> int | None:
    """Returns the operand dim of which each index names one element, or None."""
    is_row = len(indexed) == 1 and tuple(dropped) == tuple(indexed) and indices[-1] == 1
    return indexed[0] if is_row else None


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a table along a dim, `count` in all, of which this device has a piece."""

    operation: Operation
    dim: int
    count: int
    factor: Dim
    piece: DevicePiece

    def located(self, x: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the indices in the whole table and in this piece, `x`, and which lie in it.

        A lookup that promises to stay within the table is clamped on one device all the same.
        """
        at, mode = _wide(at), self.operation.params["mode"]
        looks_up = self.operation.name == "gather" and mode != GatherScatterMode.FILL_OR_DROP
        if looks_up or mode == GatherScatterMode.CLIP:
            at = jnp.clip(at, 0, self.count - 1)
        size = x.shape[self.dim]
        here = at - (self.piece.index(self.factor) * size).astype(at.dtype)
        return at, here, (here >= 0) & (here < size)


def _looked_up(
    table: _Rows, x: jax.Array, at: jax.Array, size: tuple[int, ...], looped: list[int]
) -> jax.Array:
    """Looks up the rows of this piece of the table, with zeros for rows of other pieces."""
    params = table.operation.params
    at, here, mine = table.located(x, at)
    safe = jnp.clip(here, 0, x.shape[table.dim] - 1)
    (rows,) = bind(
        table.operation,
        [x, safe],
        slice_sizes=size,
        mode=GatherScatterMode.CLIP,
        fill_value=None,
        unique_indices=False,
        indices_are_sorted=False,
    )
    rows = jnp.where(lax.broadcast_in_dim(mine[..., 0], rows.shape, looped), rows, 0)
    if params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return rows
    # One device adds the fill value for an index outside of the whole table.
    outside = (at < 0) | (at >= table.count)
    is_first = table.piece.index(table.factor) == 0
    fill = _fill_value(params["fill_value"], rows.dtype)
    stands = lax.broadcast_in_dim(outside[..., 0] & is_first, rows.shape, looped)
    return jnp.where(stands, fill, rows)


def _fill_value(given: float | None, dtype: jnp.dtype) -> jax.Array:
    """Returns JAX's fill value for an index out of bounds: NaN, or the extreme integer."""
    if given is None and jnp.issubdtype(dtype, jnp.inexact):
        given = jnp.nan
    elif given is None:
        extreme = jnp.iinfo(dtype)
        given = extreme.min if extreme.min < 0 else extreme.max
    return jnp.asarray(given, dtype)


@rule(*(f"scatter{dash}{kind}" for dash in "-_" for kind in ("add", "sub")))
def scatter_add(operation: Operation) -> Factors:
    """Updates are contracted: each device adds its own, onto the operand on one of them.

    The operand may be cut along a dim of which each index takes one element: each device adds the
    rows that it holds and drops the others.
    """
    return _scatter(operation, adds=True)


@rule("scatter", *(f"scatter{dash}{kind}" for dash in "-_" for kind in ("mul", "min", "max")))
def scatter(operation: Operation) -> Factors:
    """Updates are whole except along window and batching dims: their order may matter."""
    return _scatter(operation, adds=False)


def _scatter(operation: Operation, *, adds: bool) -> Factors:
    numbers = operation.params["dimension_numbers"]
    operand, indices, updates = (var.aval.shape for var in operation.invars)
    factors = FactorList()
    target: list[Dim] = [None] * len(operand)
    index: list[Dim] = [None] * len(indices)
    update: list[Dim] = [None] * len(updates)
    batching = numbers.scatter_indices_batching_dims
    looped = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    sums: dict[int, Reduction] = {}
    for at, dim in enumerate(looped):
        if at in batching:
            index[at] = update[dim] = factors.new(indices[at])
        elif adds:
            index[at] = update[dim] = factors.new(indices[at], sums)
    for dim, at in zip(numbers.operand_batching_dims, batching, strict=True):
        target[dim] = index[at]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [dim for dim in range(len(operand)) if dim not in gone]
    for at, dim in zip(numbers.update_window_dims, kept, strict=True):
        if updates[at] == operand[dim]:
            target[dim] = update[at] = factors.new(operand[dim])
    rows = numbers.scatter_dims_to_operand_dims
    row = _single_row(rows, numbers.inserted_window_dims, indices) if adds else None
    if row is not None:
        target[row] = factors.new(operand[row])

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        x, at, new = values
        for factor in sums:
            if piece.parts(factor) > 1:
                # The operand counts once in the sum: on the first device along the factor.
                x = jnp.where(piece.index(factor) == 0, x, jnp.zeros((), x.dtype))
        if row is None or piece.parts(target[row]) == 1:
            return bind(operation, [x, at, new])
        here, mine = _Rows(operation, row, operand[row], target[row], piece).located(x, at)[1:]
        here = jnp.where(mine, here, x.shape[row])
        promises = {"unique_indices": False, "indices_are_sorted": False}
        return bind(operation, [x, here, new], mode=GatherScatterMode.FILL_OR_DROP, **promises)

    return Factors(
        (tuple(target), tuple(index), tuple(update)),
        (tuple(target),),
        tuple(factors),
        sums,
        flops=float(math.prod(updates)),
        local=local,
    )
