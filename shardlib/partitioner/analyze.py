"""Decides the layout of every value of a traced program, before any lowering.

The walk follows the program forward. Each operation takes the layouts of its operands, chooses the
mesh axes that cut its factors, and fixes the layouts of its operands and results. The answer is a
`Program`: plain data that `lower` executes.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlib.errors import PartitionError
from shardlib.jaxprs import REMAT, Operation, flatten, is_literal
from shardlib.jaxprs import Program as Flat
from shardlib.partitioner import loops
from shardlib.partitioner.choose import Assignment, Choice, choose, dims_of
from shardlib.partitioner.factors import ELEMENTWISE, Factors, factors_of
from shardlib.partitioner.layout import (
    Dims,
    Layout,
    Sizes,
    degree,
    from_spec,
    moved_bytes,
    num_bytes,
    scattered,
    whole,
)
from shardlib.partitioner.program import Program, Step, source_of
from shardlib.partitioner.wanted import Readers, wanted_layouts

_UNSUPPORTED = frozenset({"shard_map", "pallas_call", "custom_partitioning", "run_state"})
# A parameter that is only cast, transposed or named keeps its storage layout.
_STAYS_STORED = frozenset(
    {"convert_element_type", "copy", "copy_p", "transpose", "squeeze", "name"}
)
_KEEPS_ZERO = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p"})


class Analysis:
    """The layouts of one program on one mesh.

    Args:
        sizes: Devices along each mesh axis.
        batch_axes: The axes that cut the batch: parameters are gathered over them where they are
            used, as ZeRO-3 does (Rajbhandari et al. 2020, section 5.3).
    """

    def __init__(self, sizes: Sizes, batch_axes: Sequence[str]):
        self.sizes = sizes
        self.batch_axes = frozenset(batch_axes)
        self._programs: dict[Any, Program] = {}

    def program(
        self, jaxpr: Any, inputs: Sequence[Layout], wanted: Sequence[Dims | None]
    ) -> Program:
        """Returns the program of a jaxpr, with the layout of every value.

        Args:
            jaxpr: An open jaxpr whose `constvars` come first among the inputs.
            inputs: Layouts of its constants and arguments.
            wanted: Wanted dims of each result, or None if unknown.

        Raises:
            PartitionError: If it holds an operation that sees the mesh itself or has effects.
        """
        key = jaxpr, tuple(inputs), tuple(wanted)
        if key not in self._programs:
            flat = flatten(jaxpr, fenced=True)
            self._programs[key] = Walk(self, flat, inputs, wanted).run()
        return self._programs[key]

    def closed(
        self, closed: Any, inputs: Sequence[Layout], wanted: Sequence[Dims | None] | None = None
    ) -> Program:
        """Returns the program of a closed jaxpr; its constants are replicated."""
        consts = [whole(len(v.aval.shape)) for v in closed.jaxpr.constvars]
        wanted = wanted or [None] * len(closed.jaxpr.outvars)
        return self.program(closed.jaxpr, [*consts, *inputs], wanted)


class Walk:
    """One pass over a flat program."""

    def __init__(
        self,
        analysis: Analysis,
        flat: Flat,
        inputs: Sequence[Layout],
        wanted: Sequence[Dims | None],
    ):
        self.analysis, self.sizes, self.flat = analysis, analysis.sizes, flat
        self.inputs = tuple(inputs)
        self.at: dict[Any, Layout] = dict(zip(flat.invars, inputs, strict=True))
        self._wanted = wanted_layouts(flat, wanted)
        self._readers = Readers(flat, self.at)
        atoms = [atom for operation in flat.operations for atom in operation.invars]
        atoms += flat.outvars
        self._uses = collections.Counter(atom for atom in atoms if not is_literal(atom))

    def run(self) -> Program:
        steps = []
        for operation in self.flat.operations:
            step = self._step(operation, [self._read(v) for v in operation.invars])
            step.settled = self._settled(step)
            steps.append(step)
            self.at.update(zip(operation.outvars, step.settled or step.results, strict=True))
        outputs = tuple(self._read(v) for v in self.flat.outvars)
        return Program(self.flat, self.inputs, steps, outputs)

    def wanted(self, var: Any) -> Dims | None:
        """Returns the dims that the end of the program wants for a value, or else the dims of
        another operand of an operation that reads it."""
        return self._wanted.get(var) or self._readers.wants(var)

    def used(self, layout: Layout) -> Layout:
        """Returns the layout of a parameter where it is used: whole over the batch axes."""
        if not layout.stored:
            return layout
        batch = self.analysis.batch_axes
        return Layout(tuple(tuple(a for a in dim if a not in batch) for dim in layout.dims))

    def _read(self, atom: Any) -> Layout:
        if is_literal(atom):
            is_number = isinstance(atom.val, int | float | np.generic)
            made = ((),) * len(atom.aval.shape)
            return Layout(made, made=True, zero=is_number and bool(atom.val == 0))
        if atom not in self.at:
            self.at[atom] = whole(len(atom.aval.shape))  # a constant captured by an inner call
        return self.at[atom]

    def _step(self, operation: Operation, ins: list[Layout]) -> Step:
        name = operation.name
        if is_unsupported(operation):
            raise _refusal(name, operation)
        if name in REMAT:
            return loops.again(self, operation, ins)
        if name in ("scan", "while", "cond"):
            step = {"scan": loops.scan, "while": loops.while_loop, "cond": loops.cond}[name]
            return step(self, operation, ins)
        if name == "sharding_constraint":
            return self._constraint(operation, ins[0])
        if name in ("optimization_barrier", "device_put"):
            results = tuple(layout.complete() for layout in ins)
            return Step(operation, results, results)
        factors = factors_of(operation)
        if factors is None:
            return self._whole(operation, ins)
        if name in _STAYS_STORED and ins[0].stored:
            return self._stored(operation, ins[0], factors)
        return self._cut(operation, ins, factors)

    def _cut(self, operation: Operation, ins: list[Layout], factors: Factors) -> Step:
        """Returns the step of an operation on pieces, cut along the cheapest factors."""
        if _uses_parameters(operation, ins):
            ins = [self.used(layout) for layout in ins]
        kept = _kept_pending(ins, factors)
        ins = [x.keeping(pending) for x, pending in zip(ins, kept, strict=True)]
        if _can_be_made(operation, ins):
            is_zero = ins[:1] and ins[0].zero and operation.name in _KEEPS_ZERO
            results = [
                Layout(((),) * len(v.aval.shape), made=True, zero=bool(is_zero))
                for v in operation.outvars
            ]
            return Step(operation, tuple(ins), tuple(results), factors=factors)
        found = choose(self._choice(operation, ins, factors), self.sizes)
        pending = frozenset[str]().union(*kept)
        pairs = list(zip(ins, factors.operands, strict=True))
        operands = tuple(Layout(dims_of(dims, found), have.pending) for have, dims in pairs)
        sums = [a for f, kind in factors.reduced.items() if kind == "sum" for a in found.get(f, ())]
        results = [Layout(dims_of(dims, found), pending.union(sums)) for dims in factors.results]
        moved = self._moved(operation, ins, operands)
        return Step(operation, operands, tuple(results), found, factors, moved_bytes=moved)

    def _choice(self, operation: Operation, ins: list[Layout], factors: Factors) -> Choice:
        # A value written into one made here takes the layout that its reader wants.
        is_made_here = ins and ins[0].made and operation.invars[0].aval.shape
        wants = self.wanted if is_made_here else self._wanted.get
        return Choice(
            factors,
            tuple(ins),
            tuple(num_bytes(v.aval) for v in operation.invars),
            tuple(num_bytes(v.aval) for v in operation.outvars),
            tuple(wants(v) for v in operation.outvars),
        )

    def _moved(self, operation: Operation, have: Sequence[Layout], want: Sequence[Layout]) -> float:
        triples = zip(operation.invars, have, want, strict=True)
        return sum(moved_bytes(num_bytes(v.aval), h, w.dims, self.sizes) for v, h, w in triples)

    def _stored(self, operation: Operation, layout: Layout, factors: Factors) -> Step:
        """Returns the step of a parameter that changes only its dtype or the order of its dims."""
        found: Assignment = {}
        for factor, axes in zip(factors.operands[0], layout.dims, strict=True):
            if axes and factor is not None and not factors.sizes[factor] % degree(axes, self.sizes):
                found[factor] = axes
        operand = dataclasses.replace(layout, dims=dims_of(factors.operands[0], found))
        result = Layout(dims_of(factors.results[0], found), stored=True)
        return Step(operation, (operand,), (result,), found, factors)

    def _whole(self, operation: Operation, ins: list[Layout]) -> Step:
        """Returns the step of an unknown operation, which every device computes whole."""
        operands = tuple(whole(len(v.aval.shape)) for v in operation.invars)
        results = tuple(whole(len(v.aval.shape)) for v in operation.outvars)
        moved = self._moved(operation, ins, operands)
        return Step(operation, operands, results, moved_bytes=moved, is_whole=True)

    def _constraint(self, operation: Operation, layout: Layout) -> Step:
        """Returns the step of a user's constraint; unconstrained dims keep their axes."""
        sharding, open_dims = (
            operation.params["sharding"],
            operation.params.get("unconstrained_dims") or (),
        )
        if not hasattr(sharding, "spec"):
            raise _refusal(f"a constraint to {sharding}", operation)
        entries = [e if isinstance(e, str | tuple) else None for e in sharding.spec]
        asked = from_spec(entries, len(layout.dims))
        if not set(asked.axes) <= set(self.sizes):
            raise _refusal(f"a constraint to axes of another mesh, {sharding.spec},", operation)
        shape = operation.invars[0].aval.shape
        if any(n % degree(axes, self.sizes) for n, axes in zip(shape, asked.dims, strict=True)):
            raise _refusal(f"a constraint of an array {shape} to {sharding.spec}", operation)
        dims = tuple(
            tuple(a for a in layout.dims[dim] if a not in asked.axes) if dim in open_dims else axes
            for dim, axes in enumerate(asked.dims)
        )
        return Step(operation, (Layout(dims),), (Layout(dims),))

    def _settled(self, step: Step) -> tuple[Layout, ...] | None:
        """Returns the results' layouts after the sums that cannot wait: sums with several readers
        and sums of which the reader wants a part."""
        settled = []
        for var, layout in zip(step.operation.outvars, step.results, strict=True):
            if layout.pending:
                wanted = self._wanted.get(var)
                shape = var.aval.shape
                part = wanted and scattered(layout, wanted, shape, self.sizes)
                layout = part or (layout.complete() if self._uses[var] > 1 else layout)
            settled.append(layout)
        return None if tuple(settled) == step.results else tuple(settled)


def _kept_pending(ins: Sequence[Layout], factors: Factors) -> list[frozenset[str]]:
    """Returns the axes whose sums stay pending in each operand, because the operation is linear.

    An axis over which one operand is pending must not cut another: the product of a term and a
    piece is neither a term nor a piece.
    """
    none = [frozenset[str]()] * len(ins)
    if factors.linear == "no" or not any(layout.pending for layout in ins):
        return none
    axes = [frozenset((*layout.axes, *layout.pending)) for layout in ins]
    if factors.linear in ("first", "each"):
        linear = range(1 if factors.linear == "first" else len(ins))
        if sum(bool(ins[i].pending) for i in linear) != 1:
            return none
        return [
            x.pending.difference(*(other for j, other in enumerate(axes) if j != i))
            if i in linear
            else frozenset()
            for i, x in enumerate(ins)
        ]
    # Zeros are pending over any axes; all other terms must be pending over the same axes.
    alike = frozenset.intersection(*(layout.pending for layout in ins if not layout.zero))
    alike = alike.difference(*(layout.axes for layout in ins))
    return [frozenset() if layout.zero else alike for layout in ins]


def _uses_parameters(operation: Operation, ins: Sequence[Layout]) -> bool:
    """Returns whether to gather the parameters among the operands: they meet activations, or the
    operation is neither elementwise nor a sum. Their sum of squares is computed as stored."""
    meets = any(x.dims and not x.stored and not x.made for x in ins)
    return meets or not (operation.name in ELEMENTWISE or operation.name == "reduce_sum")


def _can_be_made(operation: Operation, ins: Sequence[Layout]) -> bool:
    """Returns whether any device can make any piece of the results: constants, iota, random bits of
    a key, and elementwise functions of such values."""
    name, shape = operation.name, operation.outvars[0].aval.shape
    if not shape or any(layout.axes or layout.pending for layout in ins):
        return False
    if name in ("iota", "random_bits"):
        return True
    if name == "broadcast_in_dim" and all(not v.aval.shape for v in operation.invars):
        return True
    is_pointwise = name in ELEMENTWISE or name == "broadcast_in_dim"
    return is_pointwise and all(layout.made for layout in ins)


def is_unsupported(operation: Operation) -> bool:
    """Returns whether an operation sees the mesh itself, has effects, or names the devices or the
    memories of its results."""
    if operation.name == "device_put":
        return any(device is not None for device in operation.params["devices"])
    if operation.name == "reshard":
        return any(entry is not None for entry in operation.params["dst_sharding"].spec)
    effects = {type(effect).__name__ for effect in operation.equation.effects}
    # A collective over an axis of an outer region only nominally has an effect.
    return operation.name in _UNSUPPORTED or bool(effects - {"NamedAxisEffect"})


def _refusal(what: str, operation: Operation) -> PartitionError:
    return PartitionError(
        f"{what} at {source_of(operation)} cannot be partitioned by shardlib.\n"
        "  Call it outside of the partitioned function, or leave the function to XLA."
    )
