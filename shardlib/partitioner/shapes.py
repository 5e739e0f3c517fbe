"""Factors of operations that change the shape of a value or the positions of its elements."""

import functools
import math
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from shardlib.jaxprs import Operation, reshaped_dims
from shardlib.partitioner.factors import (
    Arrays,
    DevicePiece,
    Dim,
    Factors,
    Linear,
    Local,
    bind,
    piece_shape,
    rule,
)


@rule("broadcast_in_dim")
def broadcast_in_dim(operation: Operation) -> Factors | None:
    """Dims of the operand and new dims are factors."""
    shape = operation.outvars[0].aval.shape
    source = operation.invars[0].aval.shape
    at = operation.params["broadcast_dimensions"]
    if len(operation.invars) > 1:
        return None  # a dynamic shape
    # A repeated dim has size 1 in the operand.
    operand = tuple(to if source[dim] == shape[to] else None for dim, to in enumerate(at))
    every = tuple(range(len(shape)))

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        return bind(operation, values, shape=piece_shape(shape, every, piece))

    # A copy of a pending sum is pending too, but larger, so the sum is taken first.
    linear: Linear = "first" if math.prod(shape) == math.prod(source) else "no"
    return Factors((operand,), (every,), tuple(shape), linear=linear, local=local)


@rule("transpose")
def transpose(operation: Operation) -> Factors:
    shape = operation.invars[0].aval.shape
    order = tuple(operation.params["permutation"])
    return Factors((tuple(range(len(shape))),), (order,), tuple(shape), linear="first")


@rule("squeeze")
def squeeze(operation: Operation) -> Factors:
    shape, gone = operation.invars[0].aval.shape, operation.params["dimensions"]
    operand = tuple(None if dim in gone else dim for dim in range(len(shape)))
    kept = tuple(dim for dim in operand if dim is not None)
    return Factors((operand,), (kept,), tuple(shape), linear="first")


@rule("reshape")
def reshape(operation: Operation) -> Factors | None:
    """The major dims of each merged or split group of dims correspond to each other.

    `[a * b, c] -> [a, b, c]` has the factors a and c: cut into a number of pieces that divides a,
    the rows of a piece are whole rows of a.
    """
    old, new = operation.invars[0].aval.shape, operation.outvars[0].aval.shape
    is_dynamic = len(operation.invars) > 1
    if operation.params.get("dimensions") is not None or is_dynamic or 0 in old:
        return None
    operand, result, sizes = _reshape_factors(old, new)

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        return bind(operation, values, new_sizes=piece_shape(new, result, piece))

    return Factors((operand,), (result,), sizes, linear="first", local=local)


def _reshape_factors(
    old: Sequence[int], new: Sequence[int]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[int, ...]]:
    operand: list[Dim] = [None] * len(old)
    result: list[Dim] = [None] * len(new)
    sizes: list[int] = []
    for before, after in reshaped_dims(old, new):
        major = next((d for d in before if old[d] > 1), None)
        goes = next((d for d in after if new[d] > 1), None)
        if major is not None and goes is not None:
            operand[major] = result[goes] = len(sizes)
            sizes.append(math.gcd(old[major], new[goes]))
    return tuple(operand), tuple(result), tuple(sizes)


def same_dims(
    operation: Operation,
    held: Collection[int],
    *,
    local: Local | None = None,
    linear: Linear = "no",
) -> Factors:
    """Returns the factors of an operation that runs along some dims and leaves the others alone.

    Dims that have the same size in all operands and results of full rank are factors. Dims in
    `held`, and all dims of operands of another rank, are whole.
    """
    avals = [var.aval for var in (*operation.invars, *operation.outvars)]
    rank = max(len(aval.shape) for aval in avals)
    full = [aval.shape for aval in avals if len(aval.shape) == rank]
    dims: list[Dim] = [
        dim if dim not in held and len({shape[dim] for shape in full}) == 1 else None
        for dim in range(rank)
    ]

    of_each = [
        tuple(dims) if len(aval.shape) == rank else (None,) * len(aval.shape) for aval in avals
    ]
    count = len(operation.invars)
    operands, results = tuple(of_each[:count]), tuple(of_each[count:])
    return Factors(operands, results, tuple(full[0]), linear=linear, local=local)


@rule("concatenate")
def concatenate(operation: Operation) -> Factors:
    return same_dims(operation, {operation.params["dimension"]}, linear="all")


@rule("split")
def split(operation: Operation) -> Factors:
    """A split into one part leaves the dim alone."""
    axis = operation.params["axis"]
    if len(operation.outvars) > 1:
        return same_dims(operation, {axis}, linear="first")

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        return bind(operation, values, sizes=(values[0].shape[axis],))

    return same_dims(operation, (), local=local, linear="first")


@rule("stack")
def stack(operation: Operation) -> Factors:
    """The new dim is whole."""
    axis, rank = operation.params["axis"], len(operation.invars[0].aval.shape)
    every = tuple(range(rank))
    operands = (every,) * len(operation.invars)
    shape = operation.invars[0].aval.shape
    return Factors(operands, ((*every[:axis], None, *every[axis:]),), tuple(shape), linear="all")


@rule("unstack")
def unstack(operation: Operation) -> Factors:
    """The removed dim is whole."""
    axis, shape = operation.params["axis"], operation.invars[0].aval.shape
    operand = tuple(None if dim == axis else dim for dim in range(len(shape)))
    kept = tuple(dim for dim in operand if dim is not None)
    results = (kept,) * len(operation.outvars)
    return Factors((operand,), results, tuple(shape), linear="first")


@rule("tile")
def tile(operation: Operation) -> Factors:
    """A dim that is not repeated is a factor."""
    return same_dims(operation, {dim for dim, n in enumerate(operation.params["reps"]) if n != 1})


@rule("rev")
def rev(operation: Operation) -> Factors:
    return same_dims(operation, set(operation.params["dimensions"]), linear="first")


@rule("pad")
def pad(operation: Operation) -> Factors:
    padding = operation.params["padding_config"]
    return same_dims(operation, {d for d, p in enumerate(padding) if tuple(p) != (0, 0, 0)})


@rule("slice")
def slice_(operation: Operation) -> Factors:
    """A dim that is taken whole is a factor."""
    shape, params = operation.invars[0].aval.shape, operation.params
    starts, ends = params["start_indices"], params["limit_indices"]
    strides = params["strides"] or (1,) * len(shape)
    held = {
        dim for dim, n in enumerate(shape) if (starts[dim], ends[dim], strides[dim]) != (0, n, 1)
    }

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        here = values[0].shape
        limits = tuple(end if dim in held else here[dim] for dim, end in enumerate(ends))
        return bind(operation, values, limit_indices=limits)

    return same_dims(operation, held, local=local, linear="first")


@rule("iota")
def iota(operation: Operation) -> Factors:
    """Numbers count along a dim: each piece counts from its start."""
    params = operation.params
    shape, along, dtype = params["shape"], params["dimension"], params["dtype"]
    every = tuple(range(len(shape)))

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        here = piece_shape(shape, every, piece)
        count = lax.broadcasted_iota(jnp.int32, here, along)
        return [(count + piece.index(along) * here[along]).astype(dtype)]

    return Factors((), (every,), tuple(shape), local=local)


@rule("reshard")
def reshard(operation: Operation) -> Factors:
    """JAX uses reshard to set the mesh of a key. It moves nothing if the spec names no axis, and
    `is_unsupported` rejects other uses."""
    return same_dims(operation, (), linear="first", local=lambda operation, values, cut: values)


@rule("random_bits")
def random_bits(operation: Operation) -> Factors | None:
    """Element i of the bits of one threefry key depends on the key and i alone, so any piece can be
    made by itself (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    This holds while `jax_threefry_partitionable` is set, which is JAX's default. Of several keys,
    each device draws all bits of its own.
    """
    (key,) = operation.invars
    shape, width = operation.params["shape"], operation.params["bit_width"]
    is_threefry = "fry" in str(key.aval.dtype)
    if key.aval.shape and is_threefry:
        keys = tuple(range(len(key.aval.shape)))
        return Factors((keys,), ((*keys, *[None] * len(shape)),), tuple(key.aval.shape))
    is_counted = is_threefry and operation.equation.ctx.threefry_partitionable
    if not is_counted or width != 32 or math.prod(shape) >= 2**32:
        return None
    every = tuple(range(len(shape)))

    def local(operation: Operation, values: Arrays, piece: DevicePiece) -> Arrays:
        if all(piece.parts(factor) == 1 for factor in every):
            return bind(operation, values)
        return [_bits(values[0], shape, piece)]

    return Factors(((),), (every,), tuple(shape), local=local)


def _bits(key: jax.Array, shape: Sequence[int], piece: DevicePiece) -> jax.Array:
    """Returns this piece of `random_bits(key, 32, shape)`, uint32."""
    here = piece_shape(shape, tuple(range(len(shape))), piece)
    number = functools.reduce(
        jnp.add,
        [
            (
                lax.broadcasted_iota(jnp.uint32, here, dim)
                + jnp.asarray(piece.index(dim), jnp.uint32) * jnp.uint32(here[dim])
            )
            * jnp.uint32(math.prod(shape[dim + 1 :]))
            for dim in range(len(shape))
        ],
        jnp.zeros(here, jnp.uint32),
    )
    first, second = jax.random.key_data(key)
    words = threefry2x32_p.bind(
        jnp.broadcast_to(first, here),
        jnp.broadcast_to(second, here),
        jnp.zeros_like(number),
        number,
    )
    return words[0] ^ words[1]
