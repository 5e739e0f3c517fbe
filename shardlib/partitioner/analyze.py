"""Decides where every value of a traced program lies, before anything is lowered.

The walk follows the program forward. Each operation takes the layouts of its operands, chooses
which mesh axes cut which of its factors, and says where operands go and results lie. Loops are
walked until what they carry keeps its layout. The answer is a `Program`: plain data that `lower`
executes and reports are made of.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.source_info_util import summarize

from shardlib.jaxprs import REMAT, Operation, flatten, is_literal, scan_parts
from shardlib.jaxprs import Program as Flat
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
    whole,
)
from shardlib.partitioner.wanted import Readers, wanted_layouts

_UNSUPPORTED = ("shard_map", "pallas_call", "custom_partitioning", "run_state")
_MAX_TRIPS = 6


class Unsupported(Exception):
    """A program holds what cannot be partitioned here; the message names it."""


@dataclasses.dataclass
class Step:
    """One operation: where its operands go, and where its results lie."""

    operation: Operation
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    assignment: Assignment = dataclasses.field(default_factory=dict)
    factors: Factors | None = None
    bodies: tuple["Program", ...] = ()
    moved: float = 0.0
    """Bytes that a device receives to bring activations to where the operation wants them."""
    settled: tuple[Layout, ...] | None = None
    """Where the results lie after sums were taken that cannot wait; None if they stay."""


@dataclasses.dataclass
class Program:
    """A partitioned jaxpr, its calls written out."""

    flat: Flat
    inputs: tuple[Layout, ...]
    steps: list[Step]
    outputs: tuple[Layout, ...]

    def walk(self) -> Iterable[Step]:
        """Yields all steps, those of bodies after the step that runs them."""
        for step in self.steps:
            yield step
            for body in step.bodies:
                yield from body.walk()


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
        self,
        jaxpr: Any,
        inputs: Sequence[Layout],
        wanted: Sequence[Dims | None],
    ) -> Program:
        """Returns where every value of a jaxpr lies.

        Args:
            jaxpr: An open jaxpr whose `constvars` come first among the inputs.
            inputs: Where its constants and arguments lie.
            wanted: Where each of its results is to go at the end, if that is known.

        Raises:
            Unsupported: If it holds an operation that sees the mesh itself or has effects.
        """
        key = (jaxpr, tuple(inputs), tuple(wanted))
        if key not in self._programs:
            flat = flatten(jaxpr, fenced=True)
            self._programs[key] = _Walk(self, flat, inputs, wanted).run()
        return self._programs[key]


class _Walk:
    """One pass over a jaxpr."""

    def __init__(
        self, analysis: Analysis, flat: Flat, inputs: Sequence[Layout], wanted: Sequence[Any]
    ):
        self.analysis, self.sizes, self.flat = analysis, analysis.sizes, flat
        self.inputs = tuple(inputs)
        self.at: dict[Any, Layout] = dict(zip(flat.invars, inputs, strict=True))
        self.wanted = wanted_layouts(flat, wanted)
        self.uses = _uses(flat)
        self.readers = Readers(flat, self.at)

    def run(self) -> Program:
        steps = []
        for operation in self.flat.operations:
            step = self._step(operation, [self.read(v) for v in operation.invars])
            self._settle(step)
            steps.append(step)
            layouts = step.settled or step.results
            self.at.update(zip(operation.outvars, layouts, strict=True))
        outputs = tuple(self.read(v) for v in self.flat.outvars)
        return Program(self.flat, self.inputs, steps, outputs)

    def read(self, atom: Any) -> Layout:
        if is_literal(atom):
            rank = len(atom.aval.shape)
            return Layout(((),) * rank, made=True, zero=_is_zero(atom.val))
        if atom not in self.at:
            self.at[atom] = whole(len(atom.aval.shape))  # a constant that a call within holds
        return self.at[atom]

    # -- one operation

    def _step(self, operation: Operation, ins: list[Layout]) -> Step:
        name = operation.primitive.name
        if name in _UNSUPPORTED or operation.equation.effects or is_placed(operation):
            raise Unsupported(f"{name} at {where(operation)}")
        if name in REMAT:
            return self._again(operation, ins)
        if name == "scan":
            return self._scan(operation, ins)
        if name == "while":
            return self._while(operation, ins)
        if name == "cond":
            return self._cond(operation, ins)
        if name == "sharding_constraint":
            return self._constraint(operation, ins[0])
        if name in ("optimization_barrier", "device_put"):
            settled = tuple(self._complete(layout) for layout in ins)
            return Step(operation, settled, settled)
        factors = factors_of(operation)
        if factors is None:
            return self._whole(operation, ins)
        return self._operation(operation, ins, factors)

    def _operation(self, operation: Operation, ins: list[Layout], factors: Factors) -> Step:
        avals = [v.aval for v in operation.invars]
        if _stays_stored(operation, ins):
            return self._stored(operation, ins[0], factors)
        ins = [self.used(layout) for layout in ins] if _gathers(operation, ins) else ins
        kept = self._kept(ins, factors)
        ins = [dataclasses.replace(x, pending=k) for x, k in zip(ins, kept, strict=True)]
        if not any(layout.axes or layout.pending for layout in ins):
            made = all(layout.made for layout in ins) and _can_be_made(operation)
            made = made or _spreads(operation)
            if made:
                return self._make(operation, ins, factors)
        outs = [v.aval for v in operation.outvars]
        choice = Choice(
            factors,
            tuple(ins),
            tuple(map(num_bytes, avals)),
            tuple(map(num_bytes, outs)),
            tuple(self._wants(v, operation, ins) for v in operation.outvars),
        )
        found = choose(choice, self.sizes)
        pending = frozenset().union(*kept) if kept else frozenset()
        operands = tuple(
            layout.at(dims_of(dims, found), layout.pending)
            for layout, dims in zip(ins, factors.operands, strict=True)
        )
        sums = {a for f, kind in factors.reduced.items() if kind == "sum" for a in found.get(f, ())}
        results = tuple(Layout(dims_of(dims, found), pending | sums) for dims in factors.results)
        moved = sum(
            moved_bytes(num_bytes(aval), have, want.dims, self.sizes)
            for aval, have, want in zip(avals, ins, operands, strict=True)
            if not have.made
        )
        return Step(operation, operands, results, found, factors, moved=moved)

    def _wants(self, var: Any, operation: Operation, ins: list[Layout]) -> Dims | None:
        """Returns where a result should lie: where the program's end wants it, or, for one that is
        written into a value which is made here, where its reader has its other operand."""
        is_made_here = ins and ins[0].made and operation.invars[0].aval.shape
        return self._wanted(var) if is_made_here else self.wanted.get(var)

    def _wanted(self, var: Any) -> Dims | None:
        return self.wanted.get(var) or self.readers.wants(var)

    def _kept(self, ins: list[Layout], factors: Factors) -> list[frozenset[str]]:
        """Returns the sums that stay pending in each operand, since the operation is linear."""
        none = [frozenset[str]()] * len(ins)
        if factors.linear == "no" or not any(layout.pending for layout in ins):
            return none
        if factors.linear == "first":
            clear = {a for layout in ins[1:] for a in (*layout.axes, *layout.pending)}
            return [ins[0].pending - clear, *none[1:]]
        if factors.linear == "each":
            if sum(bool(layout.pending) for layout in ins) > 1:
                return none
            return [
                layout.pending - {a for j, other in enumerate(ins) if j != i for a in other.axes}
                for i, layout in enumerate(ins)
            ]
        terms = [layout.pending for layout in ins if not layout.zero]
        alike = frozenset.intersection(*terms) if terms else frozenset()
        alike -= {axis for layout in ins for axis in layout.axes}
        return [frozenset() if layout.zero else alike for layout in ins]

    def _make(self, operation: Operation, ins: list[Layout], factors: Factors) -> Step:
        """A value that any device can make any part of is made where it is read."""
        is_zero = ins and all(layout.zero for layout in ins) and _keeps_zero(operation)
        results = tuple(
            Layout(((),) * len(v.aval.shape), made=True, zero=bool(is_zero))
            for v in operation.outvars
        )
        return Step(operation, tuple(ins), results, factors=factors)

    def _stored(self, operation: Operation, layout: Layout, factors: Factors) -> Step:
        """A parameter that only changes its dtype or the order of its dims stays as it is stored."""
        found: Assignment = {}
        for factor, axes in zip(factors.operands[0], layout.dims, strict=True):
            if (
                axes
                and factor is not None
                and factors.sizes[factor] % degree(axes, self.sizes) == 0
            ):
                found[factor] = axes
        operand = dataclasses.replace(layout, dims=dims_of(factors.operands[0], found))
        result = Layout(dims_of(factors.results[0], found), stored=True)
        return Step(operation, (operand,), (result,), found, factors)

    def _whole(self, operation: Operation, ins: list[Layout]) -> Step:
        """An operation that is not known is computed whole, on every device alike."""
        avals = [v.aval for v in operation.invars]
        operands = tuple(whole(len(aval.shape)) for aval in avals)
        moved = sum(
            moved_bytes(num_bytes(aval), have, want.dims, self.sizes)
            for aval, have, want in zip(avals, ins, operands, strict=True)
        )
        results = tuple(whole(len(v.aval.shape)) for v in operation.outvars)
        return Step(operation, operands, results, moved=moved)

    def _constraint(self, operation: Operation, layout: Layout) -> Step:
        """A constraint of the user's: dims that it leaves open stay as they are."""
        sharding = operation.params["sharding"]
        rank = len(layout.dims)
        if not hasattr(sharding, "spec"):
            raise Unsupported(f"a constraint to {sharding} at {where(operation)}")
        unconstrained = operation.params.get("unconstrained_dims") or set()
        asked = from_spec(_named(sharding.spec), rank)
        if set(asked.axes) - set(self.sizes):
            raise Unsupported(f"a constraint over axes of another mesh at {where(operation)}")
        taken = set(asked.axes)
        dims = tuple(
            tuple(a for a in layout.dims[dim] if a not in taken) if dim in unconstrained else axes
            for dim, axes in enumerate(asked.dims)
        )
        return Step(operation, (Layout(dims),), (Layout(dims),))

    # -- programs within

    def _again(self, operation: Operation, ins: list[Layout]) -> Step:
        """What is computed again in the backward pass, from what was kept."""
        operands = [self._complete(layout) for layout in ins]
        wanted = [self._wanted(v) for v in operation.outvars]
        body = self.analysis.program(operation.params["jaxpr"], operands, wanted)
        return Step(operation, tuple(operands), body.outputs, bodies=(body,))

    def _scan(self, operation: Operation, ins: list[Layout]) -> Step:
        closed = operation.params["jaxpr"]
        num_consts, num_carry = scan_parts(operation)
        # What every trip uses is gathered once, before the loop.
        consts = [self._complete(self.used(layout)) for layout in ins[:num_consts]]
        init = [self.used(layout) for layout in ins[num_consts : num_consts + num_carry]]
        xs = [
            dataclasses.replace(self._complete(x), dims=((), *x.dims[1:]))
            for x in ins[num_consts + num_carry :]
        ]
        rows = [dataclasses.replace(x, dims=x.dims[1:]) for x in xs]
        ys_wanted = [
            None if (dims := self.wanted.get(v)) is None else dims[1:]
            for v in operation.outvars[num_carry:]
        ]
        wanted = [None] * num_carry + ys_wanted

        def trip(carry: list[Layout]) -> Program:
            return self._closed(closed, [*consts, *carry, *rows], wanted)

        carry, program = self._fixpoint(trip, init, num_carry, pending=True)
        ys = [
            Layout(((), *self._complete(self._solid(y)).dims)) for y in program.outputs[num_carry:]
        ]
        return Step(operation, (*consts, *carry, *xs), (*carry, *ys), bodies=(program,))

    def _while(self, operation: Operation, ins: list[Layout]) -> Step:
        params = operation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        consts = [self._complete(self.used(x)) for x in ins[: num_cond + num_body]]
        init = [self.used(layout) for layout in ins[num_cond + num_body :]]

        def trip(carry: list[Layout]) -> Program:
            return self._closed(params["body_jaxpr"], [*consts[num_cond:], *carry])

        carry, body = self._fixpoint(trip, init, len(init), pending=False)
        cond = self._closed(params["cond_jaxpr"], [*consts[:num_cond], *carry])
        return Step(operation, (*consts, *carry), tuple(carry), bodies=(cond, body))

    def _closed(self, closed: Any, inputs: list[Layout], wanted: Any = None) -> Program:
        consts = [whole(len(v.aval.shape)) for v in closed.jaxpr.constvars]
        wanted = wanted or [None] * len(closed.jaxpr.outvars)
        return self.analysis.program(closed.jaxpr, [*consts, *inputs], wanted)

    def _fixpoint(
        self, trip: Any, init: list[Layout], count: int, *, pending: bool
    ) -> tuple[list[Layout], Program]:
        """Returns layouts of the carry that a trip keeps or can be brought back to.

        A sum may stay pending through a loop that begins at zero: weights of a recurrent network
        gather their gradient over all trips, and it is sent once.
        """
        carry = [self._complete(self._solid(x, keep_zero=pending)) for x in init]
        for number in range(_MAX_TRIPS):
            program = trip(carry)
            found = [
                self._next(old, self._solid(new), number, pending)
                for old, new in zip(carry, program.outputs[:count], strict=True)
            ]
            if found == [_plain(layout) for layout in carry]:
                return found, program
            carry = found
        carry = [Layout(x.dims) for x in carry]
        return carry, trip(carry)

    def _next(self, old: Layout, new: Layout, number: int, pending: bool) -> Layout:
        """Returns where a carry lies on the next trip, from where it lay and where a trip left it.

        At first it goes where the body leaves it; later it only loses axes, so that the walk ends.
        """
        keeps = new.pending if pending and (old.zero or old.pending) else frozenset()
        if number >= 2:
            keeps &= old.pending
        dims = new.dims if len(new.axes) > len(old.axes) or number == 1 else old.dims
        if number >= 3:
            dims = tuple(a if a == b else () for a, b in zip(old.dims, new.dims, strict=True))
        return Layout(dims, frozenset(keeps) - {axis for dim in dims for axis in dim})

    def _cond(self, operation: Operation, ins: list[Layout]) -> Step:
        index = whole(0)
        operands = [self._complete(self.used(self._solid(layout))) for layout in ins[1:]]
        wanted = [self.wanted.get(v) for v in operation.outvars]
        bodies = [self._closed(b, operands, wanted) for b in operation.params["branches"]]
        results = []
        for branches in zip(*(body.outputs for body in bodies), strict=True):
            solid = [self._complete(self._solid(layout)) for layout in branches]
            fixed = [x for x, given in zip(solid, branches, strict=True) if not given.made]
            results.append(_plain(max(fixed or solid, key=lambda layout: len(layout.axes))))
        return Step(operation, (index, *operands), tuple(results), bodies=tuple(bodies))

    # -- layouts

    def used(self, layout: Layout) -> Layout:
        """Returns where a parameter lies where it is used: whole over the axes of the batch."""
        if not layout.stored:
            return layout
        dims = tuple(
            tuple(a for a in dim if a not in self.analysis.batch_axes) for dim in layout.dims
        )
        return Layout(dims)

    def _complete(self, layout: Layout) -> Layout:
        return dataclasses.replace(layout, pending=frozenset()) if layout.pending else layout

    def _solid(self, layout: Layout, keep_zero: bool = False) -> Layout:
        return dataclasses.replace(layout, made=False, zero=layout.zero and keep_zero)

    def _settle(self, step: Step) -> None:
        """Takes sums at once that cannot wait, into the layout that the reader wants."""
        settled = []
        for var, layout in zip(step.operation.outvars, step.results, strict=True):
            if layout.pending:
                wanted = self.wanted.get(var)
                into = (
                    None
                    if wanted is None
                    else _scattered(layout, wanted, var.aval.shape, self.sizes)
                )
                if into is not None:
                    layout = into
                elif self.uses[var] > 1:
                    layout = self._complete(layout)
            settled.append(layout)
        if tuple(settled) != step.results:
            step.settled = tuple(settled)


def _scattered(layout: Layout, wanted: Dims, shape: Sequence[int], sizes: Sizes) -> Layout | None:
    """Returns a layout in which pending axes cut the dims that the reader wants them to cut."""
    dims, left = list(layout.dims), set(layout.pending)
    for dim, target in enumerate(wanted):
        here = dims[dim]
        while len(here) < len(target) and here == target[: len(here)] and target[len(here)] in left:
            more = target[: len(here) + 1]
            if shape[dim] % degree(more, sizes):
                break
            left.discard(more[-1])
            here = more
        dims[dim] = here
    return None if tuple(dims) == layout.dims else Layout(tuple(dims))


def _plain(layout: Layout) -> Layout:
    return Layout(layout.dims, layout.pending)


def _uses(flat: Flat) -> collections.Counter[Any]:
    """Returns how often each value is read."""
    atoms = [atom for operation in flat.operations for atom in operation.invars]
    return collections.Counter(a for a in (*atoms, *flat.outvars) if not is_literal(a))


def is_placed(operation: Operation) -> bool:
    """Whether an operation puts values on devices or into memories that it names."""
    is_put = operation.primitive.name == "device_put"
    return is_put and any(device is not None for device in operation.params["devices"])


def where(operation: Operation) -> str:
    """Returns the source line that an operation comes from."""
    return summarize(operation.equation.source_info)


def _named(spec: Any) -> list[Any]:
    """Returns the entries of a spec with open dims as None."""
    return [entry if isinstance(entry, str | tuple) else None for entry in spec]


def _is_zero(value: Any) -> bool:
    return np.ndim(value) == 0 and isinstance(value, int | float | np.generic) and value == 0


_MOVES = frozenset(["convert_element_type", "copy", "copy_p", "transpose", "squeeze", "name"])


def _stays_stored(operation: Operation, ins: list[Layout]) -> bool:
    is_cast = operation.primitive.name in _MOVES
    return is_cast and len(ins) == 1 and ins[0].stored


def _gathers(operation: Operation, ins: list[Layout]) -> bool:
    """Whether an operation uses parameters beside activations, or as more than a list of numbers."""
    rest = [x for x in ins if not x.stored and not (x.made or not x.dims)]
    pointwise = operation.primitive.name in ELEMENTWISE or operation.primitive.name == "reduce_sum"
    return bool(rest) or not pointwise


def _can_be_made(operation: Operation) -> bool:
    name = operation.primitive.name
    shape = operation.outvars[0].aval.shape
    return bool(shape) and (name in ELEMENTWISE or name in ("iota", "broadcast_in_dim"))


def _spreads(operation: Operation) -> bool:
    """Whether an operation makes a value of any shape from scalars that all devices have."""
    name = operation.primitive.name
    scalars = all(not v.aval.shape for v in operation.invars)
    return name in ("iota", "random_bits") or (name == "broadcast_in_dim" and scalars)


def _keeps_zero(operation: Operation) -> bool:
    return operation.primitive.name in ("broadcast_in_dim", "convert_element_type", "copy", "copy_p")
