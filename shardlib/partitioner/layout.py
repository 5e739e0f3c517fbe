"""Layouts of values of a traced program, and moves between them.

A device holds one shard of each value. The mesh axes of each dim identify it. `pending` holds the
axes along which the shards are terms of a sum that has not been taken yet.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec

from shardlib.mesh import spec_axes

Dims = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim, major to minor."""
Sizes = Mapping[str, int]
"""Devices along each mesh axis."""


@dataclasses.dataclass(frozen=True, slots=True)
class ValueLayout:
    """The layout of a value.

    An axis cuts one dim, or is pending, or neither. Otherwise a device would hold a term of a piece
    of the sum, which no collective can complete.
    """

    dims: Dims
    pending: frozenset[str] = frozenset()
    stored: bool = False
    """Whether it is the storage layout of a parameter, which is gathered where it is used."""
    made: bool = False
    """Whether each device can make the shard of any layout by itself, without communication."""
    zero: bool = False
    """Whether the value is known to be all zeros, which are a pending sum over any axes."""

    def __post_init__(self) -> None:
        used = [*self.axes, *self.pending]
        assert len(set(used)) == len(used), f"a mesh axis is used twice: {self}"

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns all axes that cut a dim."""
        return tuple(itertools.chain.from_iterable(self.dims))

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*[dim or None for dim in self.dims])

    def keeping(self, pending: frozenset[str]) -> "ValueLayout":
        """Returns the same layout with the sum pending over these axes alone."""
        return self if pending == self.pending else dataclasses.replace(self, pending=pending)

    def complete(self) -> "ValueLayout":
        """Returns the same layout without a pending sum."""
        return self.keeping(frozenset())

    def solid(self, keep_zero: bool = False) -> "ValueLayout":
        """Returns the same layout for a value that is held, not made."""
        return dataclasses.replace(self, made=False, zero=self.zero and keep_zero)


def whole(rank: int) -> ValueLayout:
    """Returns the layout of a replicated value."""
    return ValueLayout(((),) * rank)


def made(shape: Sequence[int], *, zero: bool = False) -> ValueLayout:
    """Returns the layout of a value that each device can make by itself."""
    return ValueLayout(((),) * len(shape), made=True, zero=zero)


def from_spec(spec: Iterable[Any] | None, rank: int, *, stored: bool = False) -> ValueLayout:
    """Returns the layout of a `PartitionSpec`; set `stored` for a parameter."""
    return ValueLayout(spec_axes(spec or (), rank), stored=stored)


def degree(axes: Sequence[str], sizes: Sizes) -> int:
    """Returns the product of the sizes of some axes."""
    return math.prod(sizes[axis] for axis in axes)


def num_bytes(aval: ShapedArray) -> int:
    """Returns the bytes of an array of this shape and dtype; a random key counts as 8."""
    return math.prod(aval.shape) * (
        8 if jnp.issubdtype(aval.dtype, jax.dtypes.extended) else aval.dtype.itemsize
    )


def _common(have: Sequence[str], want: Sequence[str]) -> int:
    count = 0
    while count < min(len(have), len(want)) and have[count] == want[count]:
        count += 1
    return count


class _MoveStep(NamedTuple):
    """A collective of a move, or a slice: `to` is the dim that an all-to-all cuts."""

    kind: Literal["scatter", "sum", "exchange", "gather", "slice"]
    axes: tuple[str, ...]
    dim: int = 0
    to: int = 0


def moved_bytes(size: float, have: ValueLayout, want: Dims, sizes: Sizes) -> float:
    """Returns the bytes that a device receives in a move of a value of `size` bytes in all, by ring
    collectives. The new layout has no pending sum."""
    if have.made or (have.dims == want and not have.pending):
        return 0.0
    shard = size / degree(have.axes, sizes)
    total = 0.0
    for step in _move_steps(have.dims, have.pending, want):
        n = degree(step.axes, sizes)
        if step.kind == "sum":
            total += 2 * shard * (n - 1) / n
        elif step.kind == "gather":
            total += shard * (n - 1)
            shard *= n
        else:
            total += 0.0 if step.kind == "slice" else shard * (n - 1) / n
            shard /= 1 if step.kind == "exchange" else n
    return total


@functools.lru_cache(maxsize=65536)
def _move_steps(have: Dims, pending: frozenset[str], want: Dims) -> tuple[_MoveStep, ...]:
    """Returns the steps from the dims `have`, with sums pending, to the dims `want`."""
    dims = [list(dim) for dim in have]
    steps, left = _scatters(dims, pending, want)
    wanted = {axis for dim in want for axis in dim}
    if left & wanted:
        # Sums are scattered behind axes that come from other dims: half the bytes of sums that
        # every device holds whole.
        others = [list(dim) for dim in dims]
        first = _exchanges(others, want)
        then, rest = _scatters(others, left, want)
        if then and all(step.kind == "exchange" for step in first):
            dims, left = others, rest
            steps += [*first, *then]
    if left:
        steps.append(_MoveStep("sum", tuple(sorted(left))))
    steps += _exchanges(dims, want)
    for dim, target in enumerate(want):
        steps += [_MoveStep("slice", (axis,), dim) for axis in target[len(dims[dim]) :]]
    return tuple(steps)


def _scatters(
    dims: list[list[str]], pending: frozenset[str], want: Dims
) -> tuple[list[_MoveStep], frozenset[str]]:
    """Returns the sums over axes with which the target cuts a dim, minor to its present axes, and
    the axes that are left; changes `dims`."""
    left, steps = set(pending), list[_MoveStep]()
    for dim, target in enumerate(want):
        here = dims[dim]
        start = len(here)
        while len(here) < len(target) and here == list(target[: len(here)]):
            axis = target[len(here)]
            if axis not in left:
                break
            here.append(axis)
            left.discard(axis)
        if added := tuple(here[start:]):
            steps.append(_MoveStep("scatter", added, dim))
    return steps, frozenset(left)


def _exchanges(dims: list[list[str]], want: Dims) -> list[_MoveStep]:
    """Returns the moves of axes between dims by all-to-all where the order allows it, and gathers
    of the rest; changes `dims`."""
    steps = []
    for dim, target in enumerate(want):
        here, kept = dims[dim], _common(dims[dim], target)
        while len(here) > kept:
            # Several axes go together where they arrive in the same order.
            moves = (
                (axes, other)
                for axes in (here[start:] for start in range(kept, len(here)))
                for other, goal in enumerate(want)
                if other != dim
                and [*dims[other], *axes] == list(goal[: len(dims[other]) + len(axes)])
            )
            axes, to = next(moves, ([], dim))
            if not axes:
                break
            steps.append(_MoveStep("exchange", tuple(axes), dim, to))
            del here[-len(axes) :]
            dims[to].extend(axes)
        if len(here) > kept:
            steps.append(_MoveStep("gather", tuple(here[kept:]), dim))
            del here[kept:]
    return steps


def scattered(
    layout: ValueLayout, wanted: Dims, shape: Sequence[int], sizes: Sizes
) -> ValueLayout | None:
    """Returns a layout in which pending axes cut the dims that the reader wants them to cut, with
    all sums taken; None without such axes."""
    dims = list(layout.dims)
    for dim, target in enumerate(wanted):
        here = dims[dim]
        while len(here) < len(target) and here == target[: len(here)]:
            more = target[: len(here) + 1]
            if more[-1] not in layout.pending or shape[dim] % degree(more, sizes):
                break
            here = more
        dims[dim] = here
    return None if tuple(dims) == layout.dims else ValueLayout(tuple(dims))


def move(x: jax.Array, have: ValueLayout, want: ValueLayout, sizes: Sizes) -> jax.Array:
    """Returns the shard in layout `want` from the shard in layout `have`, inside a manual region.
    The pending axes of `want` are among the pending axes of `have`."""
    assert want.pending <= have.pending, f"{have} cannot become {want}"
    for step in _move_steps(have.dims, have.pending - want.pending, want.dims):
        if step.kind == "scatter":
            x = _psum_scatter(x, step.axes, step.dim)
        elif step.kind == "sum":
            # In mesh order, so that every device names them in the same order.
            x = lax.psum(x, tuple(axis for axis in sizes if axis in step.axes))
        elif step.kind == "exchange":
            x = lax.all_to_all(x, step.axes, split_axis=step.to, concat_axis=step.dim, tiled=True)
        elif step.kind == "gather":
            x = lax.all_gather(x, step.axes, axis=step.dim, tiled=True)
        else:
            shard = x.shape[step.dim] // degree(step.axes, sizes)
            start = lax.axis_index(step.axes[0]) * shard
            x = lax.dynamic_slice_in_dim(x, start, shard, step.dim)
    return x


def _psum_scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns this device's part of a sum over some axes, the first of which is major.

    The dim comes first: XLA makes an all-reduce and a slice of a sum cut along the last dim
    (libtpu 0.0.42), which sends twice as much.
    """
    x = lax.psum_scatter(jnp.moveaxis(x, dim, 0), axes, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(x, 0, dim)
