"""Layouts of the values of a traced program on a mesh, and the collectives between them.

Each value has mesh axes on its dims. If devices hold summands of it, it also has the axes over
which it still has to be summed. Both propagate from the arguments through the program, as in a
compiler. An operation follows its operands; if two operands disagree, the smaller one is gathered.
A constraint of the program is met in the cheapest way. A sum over a sharded dim leaves summands.
They are reduced at the first nonlinear reader, or reduce-scattered if the value is wanted in
shards.

Source of the method: Xu et al. 2021, "GSPMD: General and Scalable Parallelization for ML
Computation Graphs", sections 3.2 and 3.5, with one pass from arguments to results instead of
repeated passes in both directions.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import PartitionSpec

from shardlib.jaxprs import reshaped_dims
from shardlib.mesh import entry_axes
from shardlib.rules.resolve import STAGE

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]
MICRO = "microbatch"
"""Pseudo-axis that splits the batch in time and not in space; nothing is communicated along it."""


def spec_of(spec: PartitionSpec, rank: int) -> Spec:
    """Returns a `PartitionSpec` as a layout of `rank` dims."""
    axes = [entry_axes(entry) for entry in spec]
    return (*axes, *((),) * (rank - len(axes)))


class Equation(Protocol):
    """An equation of a jaxpr, or a `jaxprs.Operation`."""

    @property
    def primitive(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def invars(self) -> Sequence[Any]: ...
    @property
    def outvars(self) -> Sequence[Any]: ...


class Aval(Protocol):
    """The shape and dtype of a value."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class ValueSharding:
    """Layout of a value."""

    spec: Spec
    partial: Axes = ()
    """Axes over which its summands still have to be reduced."""
    is_param: bool = False
    """Whether it holds only a parameter."""
    width: int = 0
    """Bytes per element of the summands when they were computed: they are reduced before a later
    conversion."""

    @functools.cached_property
    def axes(self) -> Axes:
        """All axes that shard it."""
        return tuple(axis for axes in self.spec for axis in axes)


@dataclasses.dataclass(frozen=True)
class Moved:
    """One collective per iteration of its loops."""

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `shift`."""
    axes: Axes
    num_bytes: float
    """Bytes of the array that is gathered or summed, per group of devices."""
    of_param: bool
    """Whether it gathers a parameter or sums a gradient, and so waits for no activation."""


@dataclasses.dataclass
class Spreading:
    """Propagation of layouts over one mesh."""

    sizes: Mapping[str, float]
    """Degrees of the mesh axes. The degree of `MICRO` is a fraction if the batch is larger than the
    traced batch."""
    resolve: Callable[[tuple[str | None, ...], tuple[int, ...], str], Spec]
    """Function from the logical axes, shape and kind of table of a constraint to its layout."""
    moved: Callable[[Moved], None]
    _degrees: dict[Axes, float] = dataclasses.field(default_factory=dict)

    def shards(self, axes: Axes) -> float:
        """Returns the number of shards along axes, in space and time."""
        if axes not in self._degrees:
            self._degrees[axes] = math.prod(self.sizes.get(axis, 1) for axis in axes)
        return self._degrees[axes]

    def num_bytes(self, aval: Aval, laid: ValueSharding) -> float:
        """Returns the bytes of a value that one device holds."""
        return nbytes(aval) / self.shards(laid.axes)

    def summand_bytes(self, aval: Aval, laid: ValueSharding) -> float:
        """Returns the bytes of the summand that one device holds."""
        held = self.num_bytes(aval, laid)
        return held * laid.width / aval.dtype.itemsize if laid.width else held

    def fitting(self, shape: Sequence[int], spec: Spec) -> Spec:
        """Returns a layout without axes that repeat or do not divide their dim, which stages need
        not."""
        if not any(spec):
            return spec
        used: set[str] = set()
        dims = []
        for size, axes in zip(shape, spec, strict=True):
            kept: Axes = ()
            for axis in axes:
                divides = axis == STAGE or size % self.shards((*kept, axis)) == 0
                if axis not in used and divides:
                    kept = (*kept, axis)
                    used.add(axis)
            dims.append(kept)
        return tuple(dims)

    def send(self, kind: str, axes: Axes, num_bytes: float, *, of_param: bool = False) -> None:
        """Records a collective over the spatial axes among `axes` that have more than one
        device."""
        real = tuple(a for a in axes if a != MICRO and self.sizes.get(a, 1) > 1)
        if real and num_bytes:
            self.moved(Moved(kind, real, num_bytes, of_param))

    def whole(self, aval: Aval, laid: ValueSharding) -> ValueSharding:
        """Returns a value with its summands reduced."""
        if not laid.partial:
            return laid
        summand = self.summand_bytes(aval, laid)
        self.send("all_reduce", laid.partial, summand, of_param=laid.is_param)
        return dataclasses.replace(laid, partial=(), width=0)

    def relaid(self, aval: Aval, laid: ValueSharding, spec: Spec) -> ValueSharding:
        """Returns a value in another layout, with its summands reduced."""
        if spec == laid.spec and not laid.partial:
            return ValueSharding(spec, (), laid.is_param)
        wanted = {axis for axes in spec for axis in axes}
        scattered = tuple(a for a in laid.partial if a in wanted)
        left = tuple(a for a in laid.partial if a not in wanted)
        held, summand = self.num_bytes(aval, laid), self.summand_bytes(aval, laid)
        self.send("reduce_scatter", scattered, summand, of_param=laid.is_param)
        self.send("all_reduce", left, summand / self.shards(scattered), of_param=laid.is_param)
        moving, gone = [], []
        for old, new in zip(laid.spec, spec, strict=True):
            for axis in old:
                if axis not in new:
                    (moving if axis in wanted else gone).append(axis)
        self.send("all_to_all", tuple(moving), held, of_param=laid.is_param)
        self.gather(aval, laid, tuple(gone))
        return ValueSharding(spec, (), laid.is_param)

    def gather(self, aval: Aval, laid: ValueSharding, axes: Axes) -> None:
        """Records that a value is gathered along axes."""
        real = tuple(axis for axis in axes if axis != MICRO)
        total = self.num_bytes(aval, laid) * self.shards(real)
        self.send("all_gather", real, total, of_param=laid.is_param)


def nbytes(aval: Aval) -> float:
    """Returns the bytes of a whole value; 0 for a value that is not an array."""
    shape = getattr(aval, "shape", None)
    if shape is None:
        return 0.0
    return float(math.prod(shape)) * getattr(aval.dtype, "itemsize", 4)


def replicated(aval: Aval) -> ValueSharding:
    """Returns the layout of a replicated value."""
    return ValueSharding(((),) * len(getattr(aval, "shape", ())))


def merged(
    spread: Spreading, avals: Sequence[Aval], shardings: Sequence[ValueSharding], out: Aval
) -> ValueSharding:
    """Returns the layout of an elementwise operation: the largest operand leads, the others
    follow."""
    rank = len(out.shape)
    spec: list[Axes] = [()] * rank
    used: set[str] = set()
    for index in sorted(range(len(avals)), key=lambda i: -spread.num_bytes(avals[i], shardings[i])):
        if len(avals[index].shape) != rank:
            continue
        for dim, axes in enumerate(shardings[index].spec):
            if axes and not spec[dim] and avals[index].shape[dim] == out.shape[dim]:
                fresh = tuple(a for a in axes if a not in used)
                spec[dim] = fresh
                used.update(fresh)
    for aval, laid in zip(avals, shardings, strict=True):
        if len(aval.shape) == rank:
            lost = [a for dim, axes in enumerate(laid.spec) for a in axes if a not in spec[dim]]
            if lost:
                spread.gather(aval, laid, tuple(lost))
    return ValueSharding(tuple(spec))


class Contraction(NamedTuple):
    """Dims of a product."""

    dims: tuple[Sequence[int], Sequence[int]]
    """Contracted dims of each operand, in pairs."""
    batch: tuple[Sequence[int], Sequence[int]]
    """Batch dims of each operand, in pairs."""
    place: Callable[[int, int], int | None]
    """Function from the number of an operand and its dim to the dim of the result, or None if the
    result lacks it."""
    rank: int
    """Rank of the result."""


def contracted(
    spread: Spreading,
    avals: Sequence[Aval],
    shardings: Sequence[ValueSharding],
    product: Contraction,
) -> tuple[ValueSharding, tuple[ValueSharding, ValueSharding]]:
    """Returns the layout of a product of two values, and the layouts in which it takes them."""
    dims, place, rank = product.dims, product.place, product.rank
    specs = _taken(spread, avals, shardings, product)
    taken = []
    for aval, laid, want in zip(avals, shardings, specs, strict=True):
        pairs = zip(laid.spec, want, strict=True)
        if lost := [axis for old, new in pairs for axis in old if axis not in new]:
            spread.gather(aval, laid, tuple(lost))
        taken.append(ValueSharding(want, (), laid.is_param))
    out: list[Axes] = [()] * rank
    for i in (0, 1):
        for dim, axes in enumerate(specs[i]):
            where = place(i, dim) if dim not in dims[i] else None
            if where is not None and not out[where]:
                out[where] = axes
    partial = tuple(axis for dim in dims[0] for axis in specs[0][dim] if axis != MICRO)
    return ValueSharding(tuple(out), partial), (taken[0], taken[1])


def _taken(
    spread: Spreading,
    avals: Sequence[Aval],
    shardings: Sequence[ValueSharding],
    product: Contraction,
) -> tuple[Spec, Spec]:
    """Returns the layouts of the operands of a product when it is computed: batch dims are sharded
    alike, and each axis occurs once."""
    dims, batch, place, _ = product
    specs = lhs, rhs = list(shardings[0].spec), list(shardings[1].spec)
    for a, b in zip(*batch, strict=True):
        both = lhs[a] or rhs[b]
        lhs[a] = rhs[b] = tuple(x for x in both if not (lhs[a] and rhs[b]) or x in lhs[a])
    used = {axis for dim in batch[0] for axis in lhs[dim]}
    # The free dims of the larger operand come first, but a weight gives way to activations.
    order = sorted((0, 1), key=lambda i: -spread.num_bytes(avals[i], shardings[i]))
    if shardings[order[0]].is_param and not shardings[order[1]].is_param:
        order.reverse()
    for i in order:
        for dim, axes in enumerate(specs[i]):
            if dim not in batch[i] and dim not in dims[i]:
                kept = tuple(a for a in axes if a not in used) if place(i, dim) is not None else ()
                specs[i][dim] = kept
                used.update(kept)
    for a, b in zip(*dims, strict=True):
        summed = tuple(x for x in dict.fromkeys((*lhs[a], *rhs[b])) if x not in used)
        lhs[a] = rhs[b] = spread.fitting((avals[0].shape[a],), (summed,))[0]
        used.update(lhs[a])
    return tuple(lhs), tuple(rhs)


def reshaped(
    spread: Spreading, old: Sequence[int], laid: ValueSharding, new: Sequence[int]
) -> Spec:
    """Returns the layout after a reshape: axes stay with the major part of their dim in the
    result."""
    spec: list[Axes] = [()] * len(new)
    for before, after in reshaped_dims(old, new):
        major = next((d for d in after if new[d] > 1), after[0])
        for dim in before:
            axes = laid.spec[dim]
            if not axes:
                continue
            same = next((d for d in after if new[d] == old[dim]), major)
            leading = all(old[d] == 1 for d in before if d < dim)
            target = major if leading else same
            if leading or new[same] == old[dim]:
                spec[target] = tuple(dict.fromkeys((*spec[target], *axes)))
    return spread.fitting(new, tuple(spec))
