"""Decides the layout of every value of a traced program, before any lowering.

The walk follows the program forward. Each operation takes the layouts of its operands, chooses the
mesh axes that cut its factors, and fixes the layouts of its operands and results. The answer is a
`PartitionedProgram`: plain data that `lower` executes.

The carry of a loop must have the same layout before and after each trip. It starts with the layout
of its initial value. The walk repeats until a trip keeps the layout, or else moves it back.
"""

import collections
import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from shardlib.cost.traced.products import PRODUCTS
from shardlib.errors import PartitionError
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
)
from shardlib.partitioner.attention import rules_cut
from shardlib.partitioner.backward_layouts import Readers, wanted_layouts
from shardlib.partitioner.choose import CutProblem, choose
from shardlib.partitioner.factors import ELEMENTWISE, Assignment, Factors, dims_of, factors_of
from shardlib.partitioner.layout import (
    Dims,
    Sizes,
    ValueLayout,
    degree,
    from_spec,
    made,
    moved_bytes,
    num_bytes,
    scattered,
    whole,
)
from shardlib.partitioner.program import PartitionedProgram, Step, source_of
from shardlib.partitioner.regions import body_of, is_region, region_fault, region_layouts

_UNSUPPORTED = frozenset({"shard_map", "pallas_call", "custom_partitioning", "run_state"})
# A parameter that is only cast, transposed or named keeps its storage layout.
_STAYS_STORED = frozenset(
    {"convert_element_type", "copy", "copy_p", "transpose", "squeeze", "name"}
)
EXPERT = "expert"
"""The mesh axis over which rows are sent to experts: it cuts the batch elsewhere."""
_MAX_TRIPS = 6
_KEEPS_ZERO = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p"})


class Analysis:
    """The layouts of one program on one mesh. `batch_axes` cut the batch: parameters are gathered
    over them where they are used, as ZeRO-3 does (Rajbhandari et al. 2020, section 5.3). `planned`
    are dims wanted for values of the flat programs. A program `of_device` is written for one device
    already, and runs as it is."""

    def __init__(
        self,
        sizes: Sizes,
        batch_axes: Sequence[str],
        planned: Mapping[Value, Dims] | None = None,
        *,
        of_device: bool = False,
    ):
        self.sizes, self.of_device = sizes, of_device
        self.planned = planned or {}
        self.batch_axes = frozenset(batch_axes)
        self._programs: dict[tuple, PartitionedProgram] = {}

    def program(
        self, jaxpr: Jaxpr, inputs: Sequence[ValueLayout], wanted: Sequence[Dims | None]
    ) -> PartitionedProgram:
        """Returns the program of a jaxpr, with the layout of every value. `constvars` come first
        among the inputs. `wanted` are the wanted dims of each result, or None if unknown.

        Raises:
            PartitionError: If it holds an operation that sees the mesh itself or has effects.
        """
        key = jaxpr, tuple(inputs), tuple(wanted)
        if key not in self._programs:
            flat = flatten(jaxpr, fenced=True)
            self._programs[key] = LayoutWalk(self, flat, inputs, wanted).run()
        return self._programs[key]

    def closed(
        self,
        closed: ClosedJaxpr,
        inputs: Sequence[ValueLayout],
        wanted: Sequence[Dims | None] | None = None,
    ) -> PartitionedProgram:
        """Returns the program of a closed jaxpr; its constants are replicated."""
        consts = [whole(len(array_of(v).shape)) for v in closed.jaxpr.constvars]
        wanted = wanted or [None] * len(closed.jaxpr.outvars)
        return self.program(closed.jaxpr, [*consts, *inputs], wanted)


class LayoutWalk:
    """One pass over a flat program."""

    def __init__(
        self,
        analysis: Analysis,
        flat: FlatProgram,
        inputs: Sequence[ValueLayout],
        wanted: Sequence[Dims | None],
    ):
        self.analysis, self.sizes, self.flat = analysis, analysis.sizes, flat
        self.inputs = tuple(inputs)
        self.at: dict[Atom, ValueLayout] = dict(zip(flat.invars, inputs, strict=True))
        self._wanted = wanted_layouts(flat, wanted, analysis.planned)
        self._readers = Readers(flat, self.at)
        atoms = [atom for operation in flat.operations for atom in operation.invars]
        atoms += flat.outvars
        self._uses = collections.Counter(atom for atom in atoms if not is_literal(atom))

    def run(self) -> PartitionedProgram:
        steps = []
        for operation in self.flat.operations:
            step = self._step(operation, [self._read(v) for v in operation.invars])
            step.settled = step.settled or self._settled(step)
            steps.append(step)
            self.at.update(zip(operation.outvars, step.settled or step.results, strict=True))
        outputs = tuple(self._read(v) for v in self.flat.outvars)
        return PartitionedProgram(self.flat, self.inputs, steps, outputs)

    def wanted(self, var: Value) -> Dims | None:
        """Returns the dims that the end of the program wants for a value, or else the dims of
        another operand of an operation that reads it."""
        return self._wanted.get(var) or self._readers.wants(var)

    def used(self, layout: ValueLayout, experts: Container[int] = ()) -> ValueLayout:
        """Returns the layout of a parameter where it is used: whole over the batch axes. The dims
        `experts` keep `EXPERT`: rows may be sent to the experts instead."""
        if not layout.stored:
            return layout
        batch = self.analysis.batch_axes

        def stays(axis: str, dim: int) -> bool:
            return axis not in batch or (axis == EXPERT and dim in experts)

        kept = (tuple(a for a in axes if stays(a, dim)) for dim, axes in enumerate(layout.dims))
        return ValueLayout(tuple(kept))

    def _read(self, atom: Atom) -> ValueLayout:
        if is_literal(atom):
            shape = array_of(atom).shape
            # JAX holds a number as itself, or as an array of its own without dims.
            is_number = not shape and jnp.issubdtype(array_of(atom).dtype, np.number)
            return made(shape, zero=is_number and bool(np.asarray(atom.val) == 0))
        if atom not in self.at:
            self.at[atom] = whole(len(atom.aval.shape))  # a constant captured by an inner call
        return self.at[atom]

    def _step(self, operation: Operation, ins: list[ValueLayout]) -> Step:
        name = operation.name
        if is_region(operation):
            if (fault := region_fault(operation, self.sizes)) is not None:
                raise _refusal(fault, operation)
            return self._region(operation, ins)
        if is_unsupported(operation) and not self.analysis.of_device:
            raise _refusal(name, operation)
        if name in REMAT:
            return _again(self, operation, ins)
        if name in _LOOPS:
            return _LOOPS[name](self, operation, ins)
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

    def _cut(self, operation: Operation, ins: list[ValueLayout], factors: Factors) -> Step:
        """Returns the step of an operation on pieces, cut along the cheapest factors."""
        stored = ins
        if _uses_parameters(operation, ins):
            shared = factors.shared if operation.name in PRODUCTS else frozenset[int]()
            pairs = zip(ins, factors.operands, strict=True)
            ins = [self.used(x, [d for d, f in enumerate(of) if f in shared]) for x, of in pairs]
        if self._is_rounded_term(operation, ins):
            factors = dataclasses.replace(factors, linear="first")
        kept = _kept_pending(ins, factors)
        ins = [x.keeping(pending) for x, pending in zip(ins, kept, strict=True)]
        if _can_be_made(operation, ins):
            zero = bool(ins) and ins[0].zero and operation.name in _KEEPS_ZERO
            results = [made(v.aval.shape, zero=zero) for v in operation.outvars]
            return Step(operation, tuple(ins), tuple(results), factors=factors)
        cut = rules_cut(operation)
        if cut is None:
            cut = choose(self._choice(operation, ins, factors), self.sizes)
        pending = frozenset[str]().union(*kept)
        pairs = list(zip(ins, factors.operands, strict=True))
        operands = tuple(ValueLayout(dims_of(dims, cut), have.pending) for have, dims in pairs)
        sums = [a for f, kind in factors.reduced.items() if kind == "sum" for a in cut.get(f, ())]
        results = [ValueLayout(dims_of(dims, cut), pending.union(sums)) for dims in factors.results]
        moved = self._moved(operation, ins, operands)
        step = Step(operation, operands, tuple(results), cut, factors, moved_bytes=moved)
        return self._lookup(step, stored) if operation.name == "gather" else step

    def _lookup(self, step: Step, ins: list[ValueLayout]) -> Step:
        """Returns the step of a lookup for which a table stays cut along its columns over the axes
        of the batch, if this sends less than the table.

        Every device looks up its columns for all rows, and an all-to-all brings whole rows back.
        """
        operation, factors, table = step.operation, step.factors, ins[0]
        lookups = self._readers.num_lookups(operation.invars[0])
        if factors is None or not table.stored or lookups is None:
            return step
        pairs = zip(factors.operands[0], table.dims, strict=True)
        columns: Assignment = {f: axes for f, axes in pairs if f is not None and axes}
        (rows,) = step.results
        is_possible = columns.keys() <= set(factors.results[0]) and not rows.pending
        if not is_possible or dims_of(factors.operands[0], columns) != table.dims:
            return step
        others = (
            (factor, tuple(axis for axis in axes if axis not in table.axes))
            for factor, axes in step.assignment.items()
        )
        cut = {factor: axes for factor, axes in others if axes} | columns
        operands = tuple(ValueLayout(dims_of(dims, cut)) for dims in factors.operands)
        parts = ValueLayout(dims_of(factors.results[0], cut))
        size = num_bytes(operation.outvars[0].aval)
        moved = self._moved(operation, ins, operands)
        back = moved_bytes(size, parts, rows.dims, self.sizes)
        # What is gathered serves all lookups.
        if lookups * (moved + back) >= self._moved(operation, ins, step.operands):
            return step
        return Step(operation, operands, (parts,), cut, factors, moved_bytes=moved, settled=(rows,))

    def _is_rounded_term(self, operation: Operation, ins: list[ValueLayout]) -> bool:
        """Returns whether an operation rounds a pending sum that a loop adds to one in few bits.

        The loop rounds its sum in each trip. If the terms of all devices are rounded as well, one
        sum after the loop is enough. In float16 they may overflow.
        """
        if operation.name != "convert_element_type" or not ins[0].pending:
            return False
        have, want = (v.aval.dtype for v in (*operation.invars, *operation.outvars))
        if not all(jnp.issubdtype(x, jnp.floating) for x in (have, want)):
            return False
        if want.itemsize >= have.itemsize or jnp.finfo(want).maxexp < 128:
            return False
        total = self._readers.running_sum(operation.outvars[0])
        at = None if total is None else self.at[total]
        return at is not None and (at.zero or ins[0].pending <= at.pending)

    def _choice(self, operation: Operation, ins: list[ValueLayout], factors: Factors) -> CutProblem:
        # A value written into one made here takes the layout that its reader wants.
        is_made_here = ins and ins[0].made and operation.invars[0].aval.shape
        wants = self.wanted if is_made_here else self._wanted.get
        planned = self.analysis.planned
        plans = (
            planned.get(v) or self._wanted.get(v) if planned else None for v in operation.outvars
        )
        return CutProblem(
            factors,
            tuple(ins),
            tuple(num_bytes(v.aval) for v in operation.invars),
            tuple(num_bytes(v.aval) for v in operation.outvars),
            tuple(wants(v) for v in operation.outvars),
            tuple(plans),
            tuple(map(self._sharers, operation.invars)),
            all(v in planned for v in operation.outvars),
            tuple(map(self._readers.num_terms, operation.outvars)) if planned else (),
            self.analysis.batch_axes,
        )

    def _sharers(self, atom: Atom) -> int:
        """Returns how many operations share a move of a value: with planned layouts, its readers
        want the same."""
        return max(self._uses[atom], 1) if self.analysis.planned and not is_literal(atom) else 1

    def _moved(
        self, operation: Operation, have: Sequence[ValueLayout], want: Sequence[ValueLayout]
    ) -> float:
        triples = zip(operation.invars, have, want, strict=True)
        return sum(moved_bytes(num_bytes(v.aval), h, w.dims, self.sizes) for v, h, w in triples)

    def _stored(self, operation: Operation, layout: ValueLayout, factors: Factors) -> Step:
        """Returns the step of a parameter that changes only its dtype or the order of its dims."""
        cut: Assignment = {}
        for factor, axes in zip(factors.operands[0], layout.dims, strict=True):
            if axes and factor is not None and not factors.sizes[factor] % degree(axes, self.sizes):
                cut[factor] = axes
        operand = dataclasses.replace(layout, dims=dims_of(factors.operands[0], cut))
        result = ValueLayout(dims_of(factors.results[0], cut), stored=True)
        return Step(operation, (operand,), (result,), cut, factors)

    def _region(self, operation: Operation, ins: list[ValueLayout]) -> Step:
        """Returns the step of a manual region, whose body runs on shards as it is."""
        operands, results = region_layouts(operation, self.sizes)
        body, moved = body_of(operation), self._moved(operation, ins, operands)
        inside = [whole(len(array_of(v).shape)) for v in (*body.constvars, *body.invars)]
        device = Analysis(self.sizes, (), of_device=True)
        program = device.program(body, inside, [None] * len(body.outvars))
        return Step(operation, operands, results, bodies=(program,), moved_bytes=moved)

    def _whole(self, operation: Operation, ins: list[ValueLayout]) -> Step:
        """Returns the step of an unknown operation, which every device computes whole."""
        operands = tuple(whole(len(v.aval.shape)) for v in operation.invars)
        results = tuple(whole(len(v.aval.shape)) for v in operation.outvars)
        moved = self._moved(operation, ins, operands)
        is_whole = not self.analysis.of_device
        return Step(operation, operands, results, moved_bytes=moved, is_whole=is_whole)

    def _constraint(self, operation: Operation, layout: ValueLayout) -> Step:
        """Returns the step of a user's constraint; unconstrained dims keep their axes."""
        sharding = operation.params["sharding"]
        open_dims = operation.params.get("unconstrained_dims") or ()
        if not hasattr(sharding, "spec"):
            raise _refusal(f"a constraint to {sharding}", operation)
        entries = [e if isinstance(e, str | tuple) else None for e in sharding.spec]
        target = from_spec(entries, len(layout.dims))
        if any(sharding.mesh.shape[axis] != self.sizes.get(axis) for axis in target.axes):
            raise _refusal(f"a constraint to axes of another mesh, {sharding.spec},", operation)
        shape = operation.invars[0].aval.shape
        if any(n % degree(axes, self.sizes) for n, axes in zip(shape, target.dims, strict=True)):
            raise _refusal(f"a constraint of an array {shape} to {sharding.spec}", operation)
        dims = tuple(
            tuple(a for a in layout.dims[dim] if a not in target.axes) if dim in open_dims else axes
            for dim, axes in enumerate(target.dims)
        )
        return Step(operation, (ValueLayout(dims),), (ValueLayout(dims),))

    def _settled(self, step: Step) -> tuple[ValueLayout, ...] | None:
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


def _kept_pending(ins: Sequence[ValueLayout], factors: Factors) -> list[frozenset[str]]:
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


def _uses_parameters(operation: Operation, ins: Sequence[ValueLayout]) -> bool:
    """Returns whether to gather the parameters among the operands: they meet activations, or the
    operation is neither elementwise nor a sum. Their sum of squares is computed as stored."""
    meets = any(x.dims and not x.stored and not x.made for x in ins)
    return meets or not (operation.name in ELEMENTWISE or operation.name == "reduce_sum")


def _can_be_made(operation: Operation, ins: Sequence[ValueLayout]) -> bool:
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


def _again(walk: LayoutWalk, operation: Operation, ins: list[ValueLayout]) -> Step:
    """Returns the step of a recomputation in the backward pass, from saved values."""
    operands = [layout.complete() for layout in ins]
    wanted = [walk.wanted(v) for v in operation.outvars]
    body = walk.analysis.program(operation.params["jaxpr"], operands, wanted)
    return Step(operation, tuple(operands), body.outputs, bodies=(body,))


def _scan(walk: LayoutWalk, operation: Operation, ins: list[ValueLayout]) -> Step:
    """Returns the step of a scan: operands are whole along the loop, and results are stacked."""
    closed = operation.params["jaxpr"]
    num_consts, num_carry = scan_parts(operation)
    # Loop constants are gathered once, before the loop.
    consts = [walk.used(layout).complete() for layout in ins[:num_consts]]
    init = [walk.used(layout) for layout in ins[num_consts : num_consts + num_carry]]
    xs = [
        dataclasses.replace(layout.complete(), dims=((), *layout.dims[1:]))
        for layout in ins[num_consts + num_carry :]
    ]
    rows = [dataclasses.replace(x, dims=x.dims[1:]) for x in xs]
    stacked = [walk.wanted(v) for v in operation.outvars[num_carry:]]
    wanted = [None] * num_carry + [dims[1:] if dims else None for dims in stacked]

    def trip(carry: Sequence[ValueLayout]) -> PartitionedProgram:
        return walk.analysis.closed(closed, [*consts, *carry, *rows], wanted)

    carry, body = _fixpoint(trip, init, sums_may_wait=True)
    ys = [ValueLayout(((), *y.dims)) for y in body.outputs[num_carry:]]
    return Step(operation, (*consts, *carry, *xs), (*carry, *ys), bodies=(body,))


def _while(walk: LayoutWalk, operation: Operation, ins: list[ValueLayout]) -> Step:
    """Returns the step of a while loop; its condition is whole, for equal trips on all devices."""
    operation, ins = _with_one_condition(operation, ins)
    params = operation.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    consts = [walk.used(x).complete() for x in ins[: num_cond + num_body]]
    init = [walk.used(layout) for layout in ins[num_cond + num_body :]]

    def trip(carry: Sequence[ValueLayout]) -> PartitionedProgram:
        return walk.analysis.closed(params["body_jaxpr"], [*consts[num_cond:], *carry])

    carry, body = _fixpoint(trip, init, sums_may_wait=False)
    cond = walk.analysis.closed(params["cond_jaxpr"], [*consts[:num_cond], *carry])
    return Step(operation, (*consts, *carry), tuple(carry), bodies=(cond, body))


def _with_one_condition(
    operation: Operation, ins: list[ValueLayout]
) -> tuple[Operation, list[ValueLayout]]:
    """Returns a loop that goes on while any of its rows does.

    The `vmap` of a loop may have a condition for each row: a row keeps its values once it has
    ended.
    """
    params = operation.params
    cond, body, count = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
    if not cond.out_avals[0].shape:
        return operation, ins
    start = -len(body.out_avals)

    def any_goes_on(*arguments: jax.Array) -> jax.Array:
        return jnp.any(jaxpr_as_fun(cond)(*arguments)[0])

    def trip(*arguments: jax.Array) -> list[jax.Array]:
        carry = arguments[start:]
        goes_on = jaxpr_as_fun(cond)(*arguments[:count], *carry)[0]
        rows = range(goes_on.ndim)
        return [
            lax.select(lax.broadcast_in_dim(goes_on, new.shape, rows), new, old)
            for new, old in zip(jaxpr_as_fun(body)(*arguments[count:]), carry, strict=True)
        ]

    changed = {
        **params,
        "cond_jaxpr": jax.make_jaxpr(any_goes_on)(*cond.in_avals),
        "body_jaxpr": jax.make_jaxpr(trip)(*cond.in_avals[:count], *body.in_avals),
        "body_nconsts": count + params["body_nconsts"],
    }
    equation = operation.equation.replace(params=changed)
    invars = operation.invars[:count] + operation.invars
    return dataclasses.replace(operation, equation=equation, invars=invars), ins[:count] + ins


def _cond(walk: LayoutWalk, operation: Operation, ins: list[ValueLayout]) -> Step:
    """Returns the step of a conditional: all branches use the layout that cuts a result most."""
    operands = [walk.used(layout).solid().complete() for layout in ins[1:]]
    wanted = [walk.wanted(v) for v in operation.outvars]
    bodies = [walk.analysis.closed(b, operands, wanted) for b in operation.params["branches"]]
    outputs = zip(*(body.outputs for body in bodies), strict=True)
    results = [ValueLayout(max(branches, key=lambda x: len(x.axes)).dims) for branches in outputs]
    return Step(operation, (whole(0), *operands), tuple(results), bodies=tuple(bodies))


def _fixpoint(
    trip: Callable[[Sequence[ValueLayout]], PartitionedProgram],
    init: Sequence[ValueLayout],
    *,
    sums_may_wait: bool,
) -> tuple[list[ValueLayout], PartitionedProgram]:
    """Returns layouts of the carry that a trip keeps or can be moved back to, and the trip.

    A sum may stay pending through a loop that begins at zero: the weights of a recurrent network
    accumulate their gradient over all trips, and it is sent once.
    """
    carry = [layout.complete().solid(keep_zero=sums_may_wait) for layout in init]
    for number in range(_MAX_TRIPS):
        body = trip(carry)
        pairs = zip(carry, body.outputs, strict=False)
        after = [_next(old, new, number, sums_may_wait) for old, new in pairs]
        # The carry is zero on the first trip alone: layouts that depend on it are walked again.
        if after == carry:
            return carry, body
        carry = after
    carry = [ValueLayout(layout.dims) for layout in carry]
    return carry, trip(carry)


def _next(old: ValueLayout, new: ValueLayout, number: int, sums_may_wait: bool) -> ValueLayout:
    """Returns the layout of a carry on the next trip, from its layouts before and after a trip.

    It follows the trip at first; later it only loses axes, so that the walk ends.
    """
    pending = new.pending if sums_may_wait and (old.zero or old.pending) else frozenset[str]()
    if number >= 2:
        pending &= old.pending
    dims = new.dims if number == 1 or len(new.axes) > len(old.axes) else old.dims
    if number >= 3:
        dims = tuple(a if a == b else () for a, b in zip(old.dims, new.dims, strict=True))
    return ValueLayout(dims, pending.difference(*dims))


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}
