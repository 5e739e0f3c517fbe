"""Classes of axes, tensors and operations: what repeats is decided once.

Layers of one structure have parameters of the same path but for numbers. Their axes are one axis,
so that the size of the problem does not depend on the number of layers.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Sequence

import jax.numpy as jnp

from shardlib.cost.traced.products import PRODUCTS
from shardlib.find.axes import MOVE, SLICE, Kind, Names, Tensor, TracedAxes, TracedUse
from shardlib.find.trace import INPUT
from shardlib.nn.attention.as_one import RowAttention
from shardlib.partitioner.factors import Factors
from shardlib.partitioner.layout import num_bytes

MIN_ELEMENTS = 2**14
"""Parameters with fewer elements are replicated, as `rules.Auto` does."""
_ROUNDS = 2
"""Rounds in which axes of no argument are told apart by the operations around them."""


@dataclasses.dataclass(frozen=True, order=True)
class Touch:
    """A dim of an argument."""

    pattern: str
    """The path of the argument, for a parameter with `*` in place of numbers."""
    dim: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FoundAxis:
    """A discovered logical axis."""

    size: int
    """The greatest number that divides all its dims."""
    touches: tuple[Touch, ...]
    """The dims of arguments that belong to it; none for an axis within the program."""
    is_layers: bool = False
    """Whether a loop takes one layer after the other along it."""

    @property
    def is_of_params(self) -> bool:
        """Whether a parameter has it; the batch and sequences are of inputs alone."""
        return any(not touch.pattern.startswith(INPUT) for touch in self.touches)


@dataclasses.dataclass
class TensorClass:
    """Tensors of one kind and shape along the same axes, which are laid out alike."""

    kind: Kind
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    names: Names
    """The rules that place them, as in `Tensor.names`."""
    trained: bool
    """Whether they have gradients and optimizer state, if they are parameters."""
    width: int
    """Bytes of an element."""
    copies: int = 0
    """Parameters of this class."""
    pass_bytes: float = 0.0
    """Bytes that passes over memory read and write, apart from products."""
    saved_bytes: float = 0.0
    """Bytes that the backward pass reads again."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_small(self) -> bool:
        """Whether it is too small to be worth a cut, as a parameter."""
        return self.elements < MIN_ELEMENTS

    @property
    def bytes(self) -> int:
        """Bytes of one whole tensor."""
        return self.elements * self.width

    @property
    def weight(self) -> float:
        """Bytes that its layout matters for."""
        return self.pass_bytes + self.saved_bytes + self.copies * self.bytes


@dataclasses.dataclass(frozen=True)
class Edge:
    """An operand or result of an operation class."""

    tensor: int
    """Number of the tensor class."""
    dims: tuple[int | None, ...]
    """The factor of each dim."""
    bytes: int
    differentiated: bool
    share: float
    """Moves for each run of the operation: fewer where the tensor is made outside of the loop, and
    where several readers share one that they all want."""
    read_as: Names = ()
    """The rules by which a parameter is read, as in `Tensor.read_as`."""


@dataclasses.dataclass
class OperationClass:
    """Operations with the same factors between the same tensor classes."""

    name: str
    factors: Factors
    operands: tuple[Edge, ...]
    results: tuple[Edge, ...]
    times: float = 0.0

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All operands and results."""
        return *self.operands, *self.results

    @property
    def multiplies(self) -> bool:
        return self.name in PRODUCTS or self.attention is not None

    @property
    def attention(self) -> RowAttention | None:
        """The attention that the operation stands for."""
        return self.factors.what if isinstance(self.factors.what, RowAttention) else None


class Classes:
    """All classes of a traced loss. The path of an input begins with `trace.INPUT`."""

    def __init__(self, traced: TracedAxes, paths: Sequence[str]):
        self._traced = traced
        self._numbers = self._axis_numbers(paths)
        self.ids = {
            path
            for tensor, path in zip(traced.inputs, paths, strict=True)
            if tensor.kind == "input" and jnp.issubdtype(tensor.aval.dtype, jnp.integer)
        }
        """The paths of inputs that hold whole numbers, such as tokens."""
        self.tensors: list[TensorClass] = []
        self._tensor_numbers: dict[tuple, int] = {}
        self.arguments = [self.number(tensor) for tensor in traced.inputs]
        """The tensor class of each argument."""
        for tensor, number in zip(traced.inputs, self.arguments, strict=True):
            self.tensors[number].copies += tensor.kind == "param"
        for tensor, times in traced.passes.items():
            if tensor.kind == "activation":
                self.tensors[self.number(tensor)].pass_bytes += times * num_bytes(tensor.aval)
        for tensor in traced.saved:
            self.tensors[self.number(tensor)].saved_bytes += tensor.times * num_bytes(tensor.aval)
        self.operations = self._operation_classes()
        self.recomputes = traced.recomputes

    def number(self, tensor: Tensor) -> int:
        """Returns the number of a tensor's class."""
        axes = tuple(self._numbers[root] for root in self._traced.axes(tensor))
        kind: Kind = "param" if tensor.kind == "param" else "activation"
        key = kind, axes, tensor.aval.shape, tensor.names, tensor.trained
        if key not in self._tensor_numbers:
            self._tensor_numbers[key] = len(self.tensors)
            width = num_bytes(tensor.aval) // max(math.prod(tensor.aval.shape), 1)
            self.tensors.append(TensorClass(*key, width))
        return self._tensor_numbers[key]

    def _axis_numbers(self, paths: Sequence[str]) -> dict[int, int]:
        """Returns the number of the axis of each root, and sets `axes`."""
        traced, root = self._traced, self._traced.dims.root
        touches: dict[int, set[Touch]] = collections.defaultdict(set)
        for tensor, path in zip(traced.inputs, paths, strict=True):
            for dim, node in enumerate(tensor.nodes):
                pattern = path if tensor.kind == "input" else pattern_of(path)
                touches[root(node)].add(Touch(pattern, dim, tensor.aval.shape))
        around = _surroundings(traced)
        roots = sorted({*touches, *around})
        order = {
            touch: n for n, touch in enumerate(sorted(set().union(*touches.values()), key=str))
        }
        names: dict[int, tuple] = {
            r: (traced.dims.sizes[r], tuple(sorted(order[t] for t in touches[r]))) for r in roots
        }
        for _ in range(_ROUNDS):
            names = {
                r: names[r] if touches[r] else (names[r][0], _digest(around[r], names))
                for r in roots
            }
        numbers: dict[tuple, int] = {}
        found: list[FoundAxis] = []
        layers = set(map(root, traced.layers))
        for r in roots:
            if names[r] not in numbers:
                numbers[names[r]] = len(found)
                found.append(FoundAxis(0, tuple(sorted(touches[r])), r in layers))
            number = numbers[names[r]]
            size = math.gcd(found[number].size, traced.dims.sizes[r])
            found[number] = dataclasses.replace(found[number], size=size)
        self.axes = found
        return {r: numbers[names[r]] for r in roots}

    def _operation_classes(self) -> list[OperationClass]:
        classes: dict[tuple, OperationClass] = {}
        for use in self._traced.uses:
            operands = tuple(
                self._edge(tensor, dims, self._share(tensor, use))
                for tensor, dims in zip(use.operands, use.factors.operands, strict=True)
                if tensor.kind != "constant" and tensor.nodes
            )
            results = tuple(
                self._edge(tensor, dims, 1.0)
                for tensor, dims in zip(use.results, use.factors.results, strict=True)
            )
            if use.name == MOVE and operands[0].tensor == results[0].tensor:
                continue
            factors = use.factors
            summed = tuple(factors.reduced)
            key = use.name, operands, results, factors.sizes, factors.flops, summed, factors.what
            found = classes.setdefault(key, OperationClass(use.name, factors, operands, results))
            found.times += use.times
        return list(classes.values())

    def _share(self, tensor: Tensor, use: TracedUse) -> float:
        # A loop takes another layer in each trip.
        made = 1.0 if use.name == SLICE else min(tensor.times / use.times, 1.0)
        return made / max(self._traced.readers[tensor], 1)

    def _edge(self, tensor: Tensor, dims: tuple[int | None, ...], share: float) -> Edge:
        return Edge(
            self.number(tensor),
            dims,
            num_bytes(tensor.aval),
            tensor.differentiated,
            share,
            tensor.read_as,
        )


def pattern_of(path: str, kept: Collection[int] = ()) -> str:
    """Returns a path with `*` in place of each number, but for `kept` ones, counted from 0."""
    order = itertools.count()
    return re.sub(r"\d+", lambda number: number[0] if next(order) in kept else "*", path)


_Around = tuple[str, int, int, tuple[int, ...]]
"""The name of an operation, which of its tensors, which dim, and the nodes of the tensor."""


def _surroundings(traced: TracedAxes) -> dict[int, set[_Around]]:
    """Returns the places of each root in the operations of the program."""
    around: dict[int, set[_Around]] = collections.defaultdict(set)
    for use in traced.uses:
        for number, tensor in enumerate((*use.operands, *use.results)):
            roots = traced.axes(tensor)
            for dim, node in enumerate(roots):
                around[node].add((use.name, number, dim, roots))
    for tensor in traced.passes:
        for node in traced.axes(tensor):
            around.setdefault(node, set())
    return around


def _digest(places: set[_Around], names: dict[int, tuple]) -> int:
    """Returns a number that tells apart axes in different places; equal within a process."""
    told = {
        (name, at, dim, tuple(hash(names[node]) for node in nodes))
        for name, at, dim, nodes in places
    }
    return hash(frozenset(told))
