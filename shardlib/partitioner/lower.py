"""Executes a partitioned program on the shards of one device, inside a fully manual region."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util

from shardlib.jaxprs import REMAT, is_literal, scan_parts
from shardlib.partitioner.choose import Assignment, dims_of
from shardlib.partitioner.factors import COLLECTIVES, Dim, bind
from shardlib.partitioner.layout import Layout, Sizes, degree, move, moved_bytes, whole
from shardlib.partitioner.order import CollectiveOrder
from shardlib.partitioner.program import Program, Step
from shardlib.sharding.extremes import Extreme, extreme


@dataclasses.dataclass
class Value:
    """A shard of a value, and the layout of the value.

    `make` makes the shard of a value in the layout in which it is read.
    """

    layout: Layout
    x: Any = None
    make: Callable[[Layout], Any] | None = None
    moved: dict[Layout, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class DeviceCut:
    """The cut of an operation along mesh axes; see `factors.Cut`."""

    assignment: Assignment
    sizes: Sizes

    def parts(self, factor: Dim) -> int:
        return degree(self._axes(factor), self.sizes)

    def index(self, factor: Dim) -> Any:
        return _index(self._axes(factor), self.sizes)

    def _axes(self, factor: Dim) -> tuple[str, ...]:
        return () if factor is None else self.assignment.get(factor, ())


def _index(axes: Sequence[str], sizes: Sizes) -> Any:
    """Returns the position of this device along the axes, major to minor."""
    at = jnp.int32(0)
    for axis in axes:
        at = at * sizes[axis] + lax.axis_index(axis).astype(jnp.int32)
    return at


class Lowering:
    """Runs programs on shards.

    Args:
        sizes: Devices along each mesh axis.
        ordered: Whether loops wait for collectives, which CPU devices need.
    """

    def __init__(self, sizes: Sizes, *, ordered: bool = False):
        self.sizes = sizes
        self._order = CollectiveOrder() if ordered else None

    def run(self, program: Program, values: Sequence[Value]) -> list[Value]:
        """Returns the results of a program, given its constants and then its arguments."""
        flat = program.flat
        env = dict(zip(flat.invars, values, strict=True))

        def read(atom: Any) -> Value:
            if is_literal(atom):
                layout = Layout(((),) * len(atom.aval.shape), made=True)
                return Value(layout, make=lambda _: jnp.asarray(atom.val, atom.aval.dtype))
            if atom not in env:  # a constant captured by an inner call
                env[atom] = _whole_values([atom.const])[0]
            return env[atom]

        for step in program.steps:
            operation = step.operation
            stack = source_info_util.current_name_stack() + operation.names
            traceback = operation.equation.source_info.traceback
            with source_info_util.user_context(traceback, name_stack=stack):
                results = self._step(step, [read(v) for v in operation.invars])
                if step.settled:
                    results = [
                        Value(layout, self.shard(v, layout))
                        for v, layout in zip(results, step.settled, strict=True)
                    ]
            env.update(zip(operation.outvars, results, strict=True))
        return [read(v) for v in flat.outvars]

    def shard(self, value: Value, want: Layout) -> Any:
        """Returns the shard of a value in another layout."""
        have = value.layout
        if value.make is None and (have.dims, have.pending) == (want.dims, want.pending):
            return value.x
        key = Layout(want.dims, want.pending)
        if key not in value.moved:
            x = self._shard(value, want)
            if have.stored:
                return x  # gathered again at each use: ZeRO-3 keeps no whole parameters
            value.moved[key] = x
        return value.moved[key]

    def _shard(self, value: Value, want: Layout) -> Any:
        if value.make is not None:
            return value.make(Layout(want.dims))
        have = value.layout
        if have.zero:
            # Zeros are a pending sum over any axes.
            have = dataclasses.replace(have, pending=have.pending | want.pending, zero=False)
        return self._send(value.x, lambda x: move(x, have, want, self.sizes), have, want)

    def _send(self, x: Any, collective: Any, have: Layout, want: Layout) -> Any:
        is_sent = moved_bytes(1.0, have, want.dims, self.sizes) > 0 or have.pending - want.pending
        if self._order is None or not is_sent:
            return collective(x)
        return self._order.send(x, collective)

    # -- one equation

    def _step(self, step: Step, ins: list[Value]) -> list[Value]:
        operation, name = step.operation, step.operation.name
        if name in REMAT:
            return self._again(step, ins)
        if step.made:
            return [self._lazily(step, ins, i) for i in range(len(step.results))]
        shards = [self.shard(v, want) for v, want in zip(ins, step.operands, strict=True)]
        if name in ("scan", "while", "cond"):
            loop = {"scan": self._scan, "while": self._while, "cond": self._cond}[name]
            return _values(step.results, self._in_order(functools.partial(loop, step), shards))
        if name == "sharding_constraint":
            return _values(step.results, shards)
        if step.factors is None:
            return _values(step.results, bind(operation, shards))
        return _values(step.results, self._operation(step, shards))

    def _operation(self, step: Step, shards: Sequence[Any]) -> Sequence[Any]:
        factors, cut = step.factors, DeviceCut(step.assignment, self.sizes)
        assert factors is not None
        compute = factors.local or _as_it_is
        if step.operation.name in COLLECTIVES and self._order is not None:
            results = self._order.send_all(shards, lambda xs: compute(step.operation, xs, cut))
        else:
            results = compute(step.operation, list(shards), cut)
        for factor, kind in factors.reduced.items():
            axes = step.assignment.get(factor, ())
            if axes and kind != "sum":
                results = [self._extreme(x, kind, axes) for x in results]
        return results

    def _extreme(self, x: Any, kind: Extreme, axes: tuple[str, ...]) -> Any:
        def collective(x: Any) -> Any:
            return extreme(x, kind, axes)

        return collective(x) if self._order is None else self._order.send(x, collective)

    def _in_order(self, loop: Any, shards: list[Any]) -> Sequence[Any]:
        return loop(shards) if self._order is None else self._order.loop(shards, loop)

    def _lazily(self, step: Step, ins: list[Value], number: int) -> Value:
        """Returns a value that is made, shard by shard, in the layouts in which it is read."""
        factors = step.factors
        assert factors is not None

        def make(want: Layout) -> Any:
            axes = zip(factors.results[number], want.dims, strict=True)
            found = {factor: dim for factor, dim in axes if factor is not None and dim}
            shards = [
                self.shard(v, Layout(dims_of(dims, found)))
                for v, dims in zip(ins, factors.operands, strict=True)
            ]
            cut = DeviceCut(found, self.sizes)
            return (factors.local or _as_it_is)(step.operation, shards, cut)[number]

        return Value(step.results[number], make=make)

    # -- programs within

    def _again(self, step: Step, ins: list[Value]) -> list[Value]:
        """Recomputes values that were not saved, behind a barrier against reuse of the first."""
        values = [
            v if v.make else Value(want, self.shard(v, want))
            for v, want in zip(ins, step.operands, strict=True)
        ]
        solid = [v for v in values if v.make is None]
        fenced = lax.optimization_barrier([v.x for v in solid])
        new = iter(_values([v.layout for v in solid], fenced))
        return self.run(step.bodies[0], [v if v.make else next(new) for v in values])

    def _scan(self, step: Step, shards: list[Any]) -> Sequence[Any]:
        params = step.operation.params
        num_consts, num_carry = scan_parts(step.operation)
        end = num_consts + num_carry
        consts, carry, xs = shards[:num_consts], shards[num_consts:end], shards[end:]
        (body,) = step.bodies
        out = [*step.results[:num_carry]]
        out += [Layout(y.dims[1:]) for y in step.results[num_carry:]]

        def trip(carry: Any, x: Any) -> Any:
            found = self._body(body, params["jaxpr"].consts, [*consts, *carry, *x], out)
            return found[:num_carry], found[num_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(trip, carry, xs, **options)
        return [*carry, *ys]

    def _while(self, step: Step, shards: list[Any]) -> Sequence[Any]:
        params = step.operation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = step.bodies
        of_cond, of_body = shards[:num_cond], shards[num_cond : num_cond + num_body]

        def goes_on(carry: Any) -> Any:
            inputs = [*of_cond, *carry]
            return self._body(cond, params["cond_jaxpr"].consts, inputs, [whole(0)])[0]

        def trip(carry: Any) -> Any:
            inputs = [*of_body, *carry]
            return self._body(body, params["body_jaxpr"].consts, inputs, step.results)

        return lax.while_loop(goes_on, trip, shards[num_cond + num_body :])

    def _cond(self, step: Step, shards: list[Any]) -> Sequence[Any]:
        index, *operands = shards

        def branch(body: Program, closed: Any) -> Any:
            return lambda *xs: self._body(body, closed.consts, xs, step.results)

        pairs = zip(step.bodies, step.operation.params["branches"], strict=True)
        return lax.switch(index, [branch(*pair) for pair in pairs], *operands)

    def _body(
        self, program: Program, consts: Sequence[Any], xs: Sequence[Any], out: Sequence[Layout]
    ) -> list[Any]:
        layouts = program.inputs[len(consts) :]
        order = self._order
        # Bodies are traced on their own: nothing in them waits for operations outside.
        self._order = None if order is None else CollectiveOrder()
        results = self.run(program, [*_whole_values(consts), *_values(layouts, xs)])
        shards = [self.shard(v, want) for v, want in zip(results, out, strict=True)]
        self._order = order
        return shards


def _values(layouts: Sequence[Layout], shards: Sequence[Any]) -> list[Value]:
    return [Value(layout, x) for layout, x in zip(layouts, shards, strict=True)]


def _whole_values(arrays: Sequence[Any]) -> list[Value]:
    return [Value(whole(jnp.ndim(x)), x) for x in arrays]


def _as_it_is(equation: Any, shards: list[Any], cut: Any) -> Sequence[Any]:
    return bind(equation, shards)
