"""Discovery of logical axes: the dims of a traced program that have to be cut alike.

Every operation connects dims: the contracted dims of a product with each other, and a dim of an
operand with the dim of the result that it becomes. `partitioner.factors` says which. Connected dims
form one axis, as the embedding of a transformer does from the token table to the head.

Source of the method: Xu et al. 2021, "GSPMD", section 3.5, for the connections; Alabed et al. 2025,
"TOAST: Fast and scalable auto-partitioning based on principled static analysis", for the classes.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardlib.cost.traced.fusion import fusion
from shardlib.cost.traced.primitives import PARAMS_TABLE, logical_axes_of
from shardlib.cost.traced.products import PRODUCTS
from shardlib.jaxprs import (
    REMAT,
    Atom,
    FlatProgram,
    Operation,
    Value,
    array_of,
    flatten,
    holds,
    is_literal,
    scan_parts,
)
from shardlib.partitioner.factors import ELEMENTWISE, Dim, Factors, factors_of
from shardlib.sharding.shared_rows import OPAQUE

Kind = Literal["param", "input", "activation", "constant"]
Names = tuple[str | None, ...]
MOVE, SLICE = "move", "slice"
"""Names of the uses that move a tensor to another layout, or take a layer of a stack."""


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
    times: float = 1.0
    """How often it is made."""
    names: Names = ()
    """The rules that place its dims, by the model: `embed` of activations, or of parameters behind
    `PARAMS_TABLE`. Empty if the model does not place it."""
    read_as: Names = ()
    """The rules by which operations read a parameter."""
    trained: bool = True
    """Whether a parameter has a gradient."""

    @property
    def differentiated(self) -> bool:
        """Whether it has a gradient."""
        is_float = jnp.issubdtype(self.aval.dtype, jnp.inexact)
        return is_float and (self.kind == "activation" or (self.kind == "param" and self.trained))


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
        names: The rules that place each argument, as in `Tensor.names`, of the first ones.
        frozen: Positions of the parameters that are not trained.
        fenced: Whether to keep recomputations apart, as in a program that has a backward pass.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        kinds: Sequence[Kind],
        names: Sequence[Names] = (),
        frozen: Collection[int] = (),
        *,
        fenced: bool = False,
    ):
        self.fenced = fenced
        self.dims = ConnectedDims()
        self.at: dict[Value, Tensor] = {}
        """The tensors by the values of the flat programs."""
        self.uses: list[TracedUse] = []
        self.passes: dict[Tensor, float] = collections.defaultdict(float)
        """Times that a tensor is read or written in memory besides the operands of products."""
        self.readers: dict[Tensor, int] = collections.defaultdict(int)
        """Operations that read a tensor."""
        self.saved: dict[Tensor, None] = {}
        """Activations that the backward pass reads again, in order."""
        self.layers: list[int] = []
        """The dims of stacked tensors of which a loop takes one layer in each trip."""
        self.recomputes = holds(closed.jaxpr, *REMAT)
        """Whether the backward pass computes layers again."""
        self._times = 1.0
        """How often the operations at hand run."""
        arguments = zip(closed.jaxpr.invars, kinds, strict=True)
        self.inputs = [
            self._tensor(
                array_of(var),
                kind,
                names[at] if at < len(names) else (),
                trained=at not in frozen,
            )
            for at, (var, kind) in enumerate(arguments)
        ]
        constants = [self._tensor(array_of(var), "constant") for var in closed.jaxpr.constvars]
        self.results = self._run(closed.jaxpr, [*constants, *self.inputs])

    def axes(self, tensor: Tensor) -> tuple[int, ...]:
        """Returns the root node of each dim."""
        return tuple(map(self.dims.root, tensor.nodes))

    def connect_as(self, gradient: "TracedAxes") -> None:
        """Connects the dims of the arguments that the program of their gradients connects. Other
        tensors keep their dims."""
        first: dict[int, int] = {}
        for tensor, differentiated in zip(self.inputs, gradient.inputs, strict=True):
            for node, axis in zip(tensor.nodes, gradient.axes(differentiated), strict=True):
                self.dims.connect(first.setdefault(axis, node), node)

    def keeps_apart(self) -> bool:
        """Returns whether a result has a dim that nothing connects with an argument, or not with
        that of an argument of its shape, though a derivative could."""
        arguments = [tensor for tensor in self.inputs if tensor.differentiated]
        reached = {axis for tensor in arguments for axis in self.axes(tensor)}
        for result in self.results:
            shape, axes = result.aval.shape, self.axes(result)
            alike = [self.axes(tensor) for tensor in arguments if tensor.aval.shape == shape]
            for dim, size in enumerate(shape):
                is_apart = any(argument[dim] != axes[dim] for argument in alike)
                if size > 1 and (is_apart or axes[dim] not in reached):
                    return True
        return False

    def _tensor(
        self,
        aval: ShapedArray,
        kind: Kind,
        names: Names = (),
        read_as: Names = (),
        trained: bool = True,
    ) -> Tensor:
        shape = getattr(aval, "shape", ())
        nodes = tuple(map(self.dims.new, shape))
        return Tensor(aval, nodes, kind, self._times, names, read_as, trained)

    @contextlib.contextmanager
    def _repeated(self, trips: int) -> Iterator[None]:
        """Counts what happens within as often as a loop has trips."""
        before, self._times = self._times, self._times * trips
        yield
        self._times = before

    def _run(self, jaxpr: Jaxpr, inputs: Sequence[Tensor]) -> list[Tensor]:
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
            walk = _WALKS.get(operation.name, TracedAxes._operation)
            at.update(zip(operation.outvars, walk(self, operation, operands), strict=True))
        if not self.fenced:
            self._count_passes(flat, at)
        self.at.update((atom, tensor) for atom, tensor in at.items() if isinstance(atom, Value))
        return [read(atom) for atom in flat.outvars]

    def _operation(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        if operation.name in ELEMENTWISE:
            return self._elementwise(operation, operands)
        kind = _kind(operands)
        trained = _trained(kind, operands)
        results = [self._tensor(v.aval, kind, trained=trained) for v in operation.outvars]
        factors = factors_of(operation) or _whole(operation)
        self._connect(factors, (*operands, *results))
        self._use(operation.name, factors, tuple(operands), tuple(results))
        if operation.name in PRODUCTS or operation.name == OPAQUE:
            self._save(operands)
        return results

    def _elementwise(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns results that lie as the first operand that the model places, or that is free.

        Tensors of one shape, one set of axes and the same names are one class, so that nothing
        moves. Operands of another class move, as does a parameter that becomes an activation: it
        may be stored otherwise.
        """
        kind, shape = _kind(operands), operation.outvars[0].aval.shape
        alike = [t for t in operands if t.aval.shape == shape and t.kind != "constant"]
        leading = [t for t in alike if (t.kind == "param") == (kind == "param")]
        names = next((t.names for t in leading if t.names), ())
        read_as = next((t.read_as for t in leading if t.read_as), ())
        placed = names, read_as, _trained(kind, operands)
        results = [self._tensor(var.aval, kind, *placed) for var in operation.outvars]
        self._connect(factors_of(operation) or _whole(operation), (*operands, *results))
        if operation.name in _SAVES_RESULTS:
            self._save(results)
        elif operation.name in _SAVES_OPERANDS and sum(t.kind != "constant" for t in operands) > 1:
            self._save(operands)
        if kind != "param":
            for tensor in dict.fromkeys(alike):
                if tensor.kind == "param" or tensor.names != names:
                    self._lay(tensor, results[0])
        return results

    def _save(self, tensors: Sequence[Tensor]) -> None:
        """Notes the activations that a derivative reads."""
        self.saved.update((t, None) for t in tensors if t.kind == "activation" and t.differentiated)

    def _constraint(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensor as the model places it by name."""
        tensor, sharding = operands[0], operation.params["sharding"]
        names, table = logical_axes_of(operation)
        axes = getattr(getattr(sharding, "mesh", None), "axis_names", ())
        is_named = names is not None and any(axis.startswith(PARAMS_TABLE) for axis in axes)
        if not is_named or tensor.kind == "constant":
            return [tensor]
        assert names is not None
        of_params = table == "params"
        if tensor.kind == "param" and not of_params:
            return [dataclasses.replace(tensor, read_as=names)]
        if of_params:
            names = params_table(names)
        placed = dataclasses.replace(tensor, names=names)
        if tensor.kind == "param":
            return [tensor if tensor.names else placed]
        self._lay(tensor, placed)
        return [placed]

    def _lay(self, tensor: Tensor, placed: Tensor) -> None:
        """Adds the move of a tensor to another of its shape."""
        if placed.nodes:
            every = tuple(range(len(placed.nodes)))
            same = Factors((every,), (every,), tuple(placed.aval.shape))
            self._use(MOVE, same, (tensor,), (placed,))

    def _passing(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        """Returns the operands, which are the results."""
        del operation
        return list(operands)

    def _use(
        self,
        name: str,
        factors: Factors,
        operands: tuple[Tensor, ...],
        results: tuple[Tensor, ...],
    ) -> None:
        if any(t.kind != "constant" and t.nodes for t in operands):
            self.uses.append(TracedUse(name, factors, operands, results, self._times))
            for tensor in operands:
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

    def _count_passes(self, flat: FlatProgram, at: dict[Atom, Tensor]) -> None:
        """Counts the tensors that a compiler reads and writes apart from products and loops."""
        for group in fusion(flat):
            if not group.own:
                for value in (*group.reads, *group.writes):
                    if value in at:
                        self.passes[at[value]] += self._times

    def _scan(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        body, length = operation.params["jaxpr"], operation.params["length"]
        num_consts, num_carry = scan_parts(operation)
        kept = num_consts + num_carry
        start = list(operands[:kept])
        for number in range(num_consts, kept):
            # A carry that begins as a constant becomes an activation.
            if start[number].kind != "activation":
                tensor = operands[number]
                carried = self._tensor(tensor.aval, "activation", tensor.names)
                self._same(tensor, carried)
                start[number] = carried
        rows = []
        with self._repeated(length):
            for tensor, var in zip(operands[kept:], body.jaxpr.invars[kept:], strict=True):
                named = tensor.names[1:], tensor.read_as[1:], tensor.trained
                row = self._tensor(array_of(var), tensor.kind, *named)
                self.dims.connect(operands[kept].nodes[0], tensor.nodes[0])
                self.layers.append(tensor.nodes[0])
                self._slice(tensor, row)
                rows.append(row)
            constants = [self._tensor(array_of(v), "constant") for v in body.jaxpr.constvars]
            results = self._run(body.jaxpr, [*constants, *start, *rows])
        for before, after in zip(start[num_consts:], results[:num_carry], strict=True):
            self._same(before, after)
        stacked = []
        for tensor, var in zip(results[num_carry:], operation.outvars[num_carry:], strict=True):
            whole = self._tensor(var.aval, "activation")
            if len(operands) > kept:
                # The backward pass reads both along the same loop.
                self.dims.connect(operands[kept].nodes[0], whole.nodes[0])
            for outside, inside in zip(whole.nodes[1:], tensor.nodes, strict=True):
                self.dims.connect(outside, inside)
            stacked.append(whole)
        return [*results[:num_carry], *stacked]

    def _slice(self, stacked: Tensor, row: Tensor) -> None:
        """Connects the layers of a stacked tensor with one of them."""
        dims = tuple(range(len(row.nodes)))
        operand: tuple[Dim, ...] = (None, *dims)
        factors = Factors((operand,), (dims,), tuple(row.aval.shape))
        self._connect(factors, (stacked, row))
        self._use(SLICE, factors, (stacked,), (row,))

    def _while(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        """One trip stands for all, whose number is not known."""
        skipped = operation.params["cond_nconsts"]
        kept = skipped + operation.params["body_nconsts"]
        body = operation.params["body_jaxpr"].jaxpr
        constants = [self._tensor(array_of(v), "constant") for v in body.constvars]
        results = self._run(body, [*constants, *operands[skipped:]])
        for before, after in zip(operands[kept:], results, strict=True):
            self._same(before, after)
        return results

    def _cond(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        """All branches are counted."""
        branches = []
        for branch in operation.params["branches"]:
            constants = [self._tensor(array_of(v), "constant") for v in branch.jaxpr.constvars]
            branches.append(self._run(branch.jaxpr, [*constants, *operands[1:]]))
        for other in branches[1:]:
            for first, second in zip(branches[0], other, strict=True):
                self._same(first, second)
        return branches[0]

    def _again(self, operation: Operation, operands: Sequence[Tensor]) -> list[Tensor]:
        """A recomputation in the backward pass."""
        return self._run(operation.params["jaxpr"], operands)


_WALKS = {
    "scan": TracedAxes._scan,
    "while": TracedAxes._while,
    "cond": TracedAxes._cond,
    **dict.fromkeys(REMAT, TracedAxes._again),
    "sharding_constraint": TracedAxes._constraint,
    **dict.fromkeys(("optimization_barrier", "device_put"), TracedAxes._passing),
}


_SAVES_OPERANDS = frozenset(("mul", "div"))
"""Elementwise operations whose derivative reads their operands, if these are not constant."""
_SAVES_RESULTS = frozenset(("exp", "tanh", "logistic", "sqrt", "rsqrt"))
"""Elementwise operations whose derivative reads their result."""


def _kind(operands: Sequence[Tensor]) -> Kind:
    kinds = {tensor.kind for tensor in operands}
    for kind in ("activation", "input"):
        if kind in kinds:
            # An input that meets a parameter has a gradient from there on.
            return "activation" if "param" in kinds else kind
    return "param" if "param" in kinds else "constant"


def _trained(kind: Kind, operands: Sequence[Tensor]) -> bool:
    return kind != "param" or any(t.trained for t in operands if t.kind == "param")


def params_table(names: Names) -> Names:
    """Returns names that the rules for parameters place."""
    return tuple(name and PARAMS_TABLE + name for name in names)


def _whole(operation: Operation) -> Factors:
    """Returns the factors of an operation that is computed whole."""
    avals = [
        [(None,) * len(v.aval.shape) for v in vs] for vs in (operation.invars, operation.outvars)
    ]
    return Factors(tuple(avals[0]), tuple(avals[1]), ())
