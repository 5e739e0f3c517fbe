"""Discovery of logical axes: the dims of a traced program that have to be cut alike.

Every operation connects dims: the contracted dims of a product with each other, and a dim of an
operand with the dim of the result that it becomes. `partitioner.factors` says which. Connected dims
form one axis, as the embedding of a transformer does from the token table to the head.

Source of the method: Xu et al. 2021, "GSPMD", section 3.5, for the connections; Alabed et al. 2025,
"TOAST: Fast and scalable auto-partitioning based on principled static analysis", for the classes.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardlib.cost.traced.fusion import fusion
from shardlib.jaxprs import (
    REMAT,
    Atom,
    FlatProgram,
    Operation,
    Value,
    array_of,
    flatten,
    is_literal,
    scan_parts,
    subprograms,
)
from shardlib.partitioner.factors import ELEMENTWISE, Dim, Factors, factors_of

Kind = Literal["param", "input", "activation", "constant"]


class ConnectedDims:
    """Connected dims, as a union-find structure over numbered nodes."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self.sizes: list[int] = []
        """The greatest number that divides all connected dims, at the root."""

    def new(self, size: int) -> int:
        """Adds a dim and returns its node."""
        self._parent.append(len(self._parent))
        self.sizes.append(size)
        return len(self._parent) - 1

    def root(self, node: int) -> int:
        """Returns the node that stands for all nodes connected with this one."""
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def connect(self, first: int, second: int) -> None:
        """Connects two dims."""
        low, high = sorted((self.root(first), self.root(second)))
        if low != high:
            self._parent[high] = low
            self.sizes[low] = math.gcd(self.sizes[low], self.sizes[high])


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A value of the program, with a node for each of its dims."""

    aval: ShapedArray
    nodes: tuple[int, ...]
    kind: Kind

    @property
    def differentiated(self) -> bool:
        """Whether it has a gradient."""
        is_float = jnp.issubdtype(self.aval.dtype, jnp.inexact)
        return is_float and self.kind in ("param", "activation")


@dataclasses.dataclass(frozen=True, eq=False)
class TracedUse:
    """An operation that may be cut, and how often it runs."""

    name: str
    factors: Factors
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    times: float


class TracedAxes:
    """The tensors and operations of the forward pass of a loss.

    Args:
        closed: The program of the loss.
        kinds: Whether each argument is a parameter or an input.
        fenced: Whether to keep recomputations apart, as in a program that has a backward pass.
    """

    def __init__(self, closed: ClosedJaxpr, kinds: Sequence[Kind], *, fenced: bool = False):
        self.fenced = fenced
        self.dims = ConnectedDims()
        self.at: dict[Value, Tensor] = {}
        """The tensors by the values of the flat programs."""
        self.uses: list[TracedUse] = []
        self.passes: dict[Tensor, float] = collections.defaultdict(float)
        """Times that a tensor is read or written in memory besides the operands of products."""
        self.readers: dict[Tensor, int] = collections.defaultdict(int)
        """Operations that read a tensor."""
        self.layers: list[int] = []
        """The dims of stacked tensors of which a loop takes one layer in each trip."""
        self.recomputes = _recomputes(closed.jaxpr)
        """Whether the backward pass computes layers again."""
        self.inputs = [
            self._tensor(array_of(var), kind)
            for var, kind in zip(closed.jaxpr.invars, kinds, strict=True)
        ]
        constants = [self._tensor(array_of(var), "constant") for var in closed.jaxpr.constvars]
        self._run(closed.jaxpr, [*constants, *self.inputs], 1.0)

    def axes(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns the root node of each dim."""
        return tuple(map(self.dims.root, tensor.nodes))

    def _tensor(self, aval: ShapedArray, kind: Kind) -> Tensor:
        shape = getattr(aval, "shape", ())
        return Tensor(aval, tuple(map(self.dims.new, shape)), kind)

    def _run(self, jaxpr: Jaxpr, inputs: Sequence[Tensor], times: float) -> list[Tensor]:
        """Walks a program; returns its results."""
        # As the partitioner calls it, so that both see the same objects.
        flat = flatten(jaxpr, fenced=True) if self.fenced else flatten(jaxpr)
        at: dict[Atom, Tensor] = dict(zip(flat.invars, inputs, strict=True))

        def read(atom: Atom) -> Tensor:
            if is_literal(atom):
                return self._tensor(array_of(atom), "constant")
            if atom not in at:
                at[atom] = self._tensor(atom.aval, "constant")
            return at[atom]

        for operation in flat.operations:
            operands = [read(atom) for atom in operation.invars]
            loop = _LOOPS.get(operation.name)
            if loop is not None:
                results = loop(self, operation, operands, times)
            else:
                results = self._operation(operation, operands, times)
            at.update(zip(operation.outvars, results, strict=True))
        if not self.fenced:
            self._count_passes(flat, at, times)
        self.at.update((atom, tensor) for atom, tensor in at.items() if isinstance(atom, Value))
        return [read(atom) for atom in flat.outvars]

    def _operation(
        self, operation: Operation, operands: Sequence[Tensor], times: float
    ) -> list[Tensor]:
        kind = _kind(operands)
        results = [self._tensor(var.aval, kind) for var in operation.outvars]
        factors = _passing(operation) or factors_of(operation) or _whole(operation)
        self._connect(factors, (*operands, *results))
        if operation.name in ELEMENTWISE:
            # Tensors of one shape and one set of axes are one class, so that nothing moves. A
            # parameter that becomes an activation is the exception: it may be stored otherwise.
            stored = [
                t for t in operands if t.kind == "param" and t.aval.shape == results[0].aval.shape
            ]
            if kind == "param" or not stored or not results[0].nodes:
                return results
            every = tuple(range(len(results[0].nodes)))
            for tensor in stored:
                same = Factors((every,), (every,), tuple(results[0].aval.shape))
                self._use(TracedUse("use", same, (tensor,), (results[0],), times))
            return results
        self._use(TracedUse(operation.name, factors, tuple(operands), tuple(results), times))
        return results

    def _use(self, use: TracedUse) -> None:
        if any(t.kind != "constant" and t.nodes for t in use.operands):
            self.uses.append(use)
            for tensor in use.operands:
                self.readers[tensor] += 1

    def _connect(self, factors: Factors, tensors: Sequence[Tensor]) -> None:
        nodes: dict[int, int] = {}
        for tensor, dims in zip(tensors, (*factors.operands, *factors.results), strict=True):
            for node, factor in zip(tensor.nodes, dims, strict=True):
                if factor is not None:
                    self.dims.connect(nodes.setdefault(factor, node), node)

    def _same(self, first: Tensor, second: Tensor) -> None:
        for one, other in zip(first.nodes, second.nodes, strict=True):
            self.dims.connect(one, other)

    def _count_passes(self, flat: FlatProgram, at: dict[Atom, Tensor], times: float) -> None:
        """Counts the tensors that a compiler reads and writes apart from products and loops."""
        for group in fusion(flat):
            if not group.own:
                for value in (*group.reads, *group.writes):
                    if value in at:
                        self.passes[at[value]] += times

    def _scan(self, operation: Operation, operands: Sequence[Tensor], times: float) -> list[Tensor]:
        body, length = operation.params["jaxpr"], operation.params["length"]
        num_consts, num_carry = scan_parts(operation)
        kept = num_consts + num_carry
        rows = []
        for tensor, var in zip(operands[kept:], body.jaxpr.invars[kept:], strict=True):
            row = self._tensor(array_of(var), tensor.kind)
            self.dims.connect(operands[kept].nodes[0], tensor.nodes[0])
            self.layers.append(tensor.nodes[0])
            self._slice(tensor, row, times * length)
            rows.append(row)
        start = list(operands[:kept])
        for number in range(num_consts, kept):
            # A carry that begins as a constant becomes an activation.
            if start[number].kind != "activation":
                carried = self._tensor(operands[number].aval, "activation")
                self._same(operands[number], carried)
                start[number] = carried
        constants = [self._tensor(array_of(v), "constant") for v in body.jaxpr.constvars]
        results = self._run(body.jaxpr, [*constants, *start, *rows], times * length)
        for before, after in zip(start[num_consts:], results[:num_carry], strict=True):
            self._same(before, after)
        stacked = []
        for tensor, var in zip(results[num_carry:], operation.outvars[num_carry:], strict=True):
            whole = self._tensor(var.aval, "activation")
            for outside, inside in zip(whole.nodes[1:], tensor.nodes, strict=True):
                self.dims.connect(outside, inside)
            stacked.append(whole)
        return [*results[:num_carry], *stacked]

    def _slice(self, stacked: Tensor, row: Tensor, times: float) -> None:
        """Connects the layers of a stacked tensor with one of them."""
        dims = tuple(range(len(row.nodes)))
        operand: tuple[Dim, ...] = (None, *dims)
        factors = Factors((operand,), (dims,), tuple(row.aval.shape))
        self._connect(factors, (stacked, row))
        self._use(TracedUse("slice", factors, (stacked,), (row,), times))

    def _while(
        self, operation: Operation, operands: Sequence[Tensor], times: float
    ) -> list[Tensor]:
        """One trip stands for all, whose number is not known."""
        skipped = operation.params["cond_nconsts"]
        kept = skipped + operation.params["body_nconsts"]
        body = operation.params["body_jaxpr"].jaxpr
        constants = [self._tensor(array_of(v), "constant") for v in body.constvars]
        results = self._run(body, [*constants, *operands[skipped:]], times)
        for before, after in zip(operands[kept:], results, strict=True):
            self._same(before, after)
        return results

    def _cond(self, operation: Operation, operands: Sequence[Tensor], times: float) -> list[Tensor]:
        """All branches are counted."""
        branches = []
        for branch in operation.params["branches"]:
            constants = [self._tensor(array_of(v), "constant") for v in branch.jaxpr.constvars]
            branches.append(self._run(branch.jaxpr, [*constants, *operands[1:]], times))
        for other in branches[1:]:
            for first, second in zip(branches[0], other, strict=True):
                self._same(first, second)
        return branches[0]

    def _again(
        self, operation: Operation, operands: Sequence[Tensor], times: float
    ) -> list[Tensor]:
        """A recomputation in the backward pass."""
        return self._run(operation.params["jaxpr"], operands, times)


def _recomputes(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive.name in REMAT or any(map(_recomputes, subprograms(equation)))
        for equation in jaxpr.eqns
    )


_LOOPS = {
    "scan": TracedAxes._scan,
    "while": TracedAxes._while,
    "cond": TracedAxes._cond,
    **dict.fromkeys(REMAT, TracedAxes._again),
}
_PASSING = frozenset(("optimization_barrier", "device_put", "sharding_constraint"))


def _kind(operands: Sequence[Tensor]) -> Kind:
    kinds = {tensor.kind for tensor in operands}
    for kind in ("activation", "input"):
        if kind in kinds:
            # An input that meets a parameter has a gradient from there on.
            return "activation" if "param" in kinds else kind
    return "param" if "param" in kinds else "constant"


def _passing(operation: Operation) -> Factors | None:
    """Returns the factors of operations whose results are their operands."""
    if operation.name not in _PASSING:
        return None
    shapes = [var.aval.shape for var in operation.invars]
    counted = iter(range(sum(map(len, shapes))))
    dims = tuple(tuple(next(counted) for _ in shape) for shape in shapes)
    return Factors(dims, dims, tuple(n for shape in shapes for n in shape))


def _whole(operation: Operation) -> Factors:
    """Returns the factors of an operation that is computed whole."""
    avals = [
        [(None,) * len(v.aval.shape) for v in vs] for vs in (operation.invars, operation.outvars)
    ]
    return Factors(tuple(avals[0]), tuple(avals[1]), ())
