"""Executes a partitioned program on the shards of one device, inside a fully manual region."""

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr

from shardlib.jaxprs import REMAT, Atom, Value, array_of, is_literal, scan_parts
from shardlib.partitioner.factors import COLLECTIVES, Arrays, DevicePiece, bind, dims_of
from shardlib.partitioner.layout import Sizes, ValueLayout, made, move, moved_bytes, whole
from shardlib.partitioner.program import PartitionedProgram, Step
from shardlib.partitioner.regions import REGION
from shardlib.sharding.across_devices import Extreme, extreme

Collective = Callable[[jax.Array], jax.Array]
_LOOPS = ("scan", "while", "cond")


@dataclasses.dataclass
class Shard:
    """A shard of a value, and the layout of the value.

    `make` makes the shard of a value in the layout in which it is read.
    """

    layout: ValueLayout
    x: Any = None
    make: Callable[[ValueLayout], jax.Array] | None = None
    moved: dict[ValueLayout, jax.Array] = dataclasses.field(default_factory=dict)


class Lowering:
    """Runs programs on shards. With `ordered`, loops wait for collectives, as CPU devices need."""

    def __init__(self, sizes: Sizes, *, ordered: bool = False):
        self.sizes = sizes
        self._order = CollectiveOrder() if ordered else None

    def run(self, program: PartitionedProgram, values: Sequence[Shard]) -> list[Shard]:
        """Returns the results of a program, given its constants and then its arguments."""
        flat = program.flat
        env: dict[Atom, Shard] = dict(zip(flat.invars, values, strict=True))

        def read(atom: Atom) -> Shard:
            if is_literal(atom):
                aval = array_of(atom)
                return Shard(made(aval.shape), make=lambda _: jnp.asarray(atom.val, aval.dtype))
            if atom not in env:  # a constant captured by an inner call
                assert isinstance(atom, Value)
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
                        Shard(layout, self.shard(v, layout))
                        for v, layout in zip(results, step.settled, strict=True)
                    ]
            env.update(zip(operation.outvars, results, strict=True))
        return [read(v) for v in flat.outvars]

    def shard(self, value: Shard, want: ValueLayout) -> jax.Array:
        """Returns the shard of a value in another layout."""
        have = value.layout
        if value.make is None and (have.dims, have.pending) == (want.dims, want.pending):
            return value.x
        key = ValueLayout(want.dims, want.pending)
        if key not in value.moved:
            x = self._shard(value, want)
            if have.stored:
                return x  # gathered again at each use: ZeRO-3 keeps no whole parameters
            value.moved[key] = x
        return value.moved[key]

    def _shard(self, value: Shard, want: ValueLayout) -> jax.Array:
        if value.make is not None:
            return value.make(ValueLayout(want.dims))
        have = value.layout
        if have.zero:
            # Zeros are a pending sum over any axes.
            have = dataclasses.replace(have, pending=have.pending | want.pending, zero=False)
        return self._send(value.x, lambda x: move(x, have, want, self.sizes), have, want)

    def _send(
        self, x: jax.Array, collective: Collective, have: ValueLayout, want: ValueLayout
    ) -> jax.Array:
        is_sent = moved_bytes(1.0, have, want.dims, self.sizes) > 0 or have.pending - want.pending
        if self._order is None or not is_sent:
            return collective(x)
        return self._order.send(x, collective)

    # -- one equation

    def _step(self, step: Step, ins: list[Shard]) -> list[Shard]:
        operation, name = step.operation, step.operation.name
        if name in REMAT:
            return self._again(step, ins)
        if step.made:
            return [self._lazily(step, ins, i) for i in range(len(step.results))]
        if name in _LOOPS and self._order is not None:
            self._order.wait()
        shards = [self.shard(v, want) for v, want in zip(ins, step.operands, strict=True)]
        if name == REGION:
            return _values(step.results, self._region(step, shards))
        if name in _LOOPS:
            loop = {"scan": self._scan, "while": self._while, "cond": self._cond}[name]
            made = [i for i, value in enumerate(ins) if value.layout.made]
            run = functools.partial(loop, step)
            results = run(shards) if self._order is None else self._order.loop(shards, made, run)
            return _values(step.results, results)
        if name == "sharding_constraint":
            return _values(step.results, shards)
        if step.factors is None:
            run = functools.partial(bind, operation)
            sends = "axis_name" in operation.params and len(shards) > 0
            made = self._order.send_all(shards, run) if self._order and sends else run(shards)
            return _values(step.results, made)
        return _values(step.results, self._operation(step, shards))

    def _operation(self, step: Step, shards: Arrays) -> Arrays:
        factors = step.factors
        assert factors is not None
        piece = DevicePiece(step.assignment, self.sizes)
        compute = functools.partial(factors.compute, step.operation, piece=piece)
        if step.operation.name in COLLECTIVES and self._order is not None:
            results = self._order.send_all(shards, compute)
        else:
            results = compute(shards)
        for factor, kind in factors.reduced.items():
            axes = step.assignment.get(factor, ())
            if axes and kind != "sum":
                results = [self._extreme(x, kind, axes) for x in results]
        return results

    def _extreme(self, x: jax.Array, kind: Extreme, axes: tuple[str, ...]) -> jax.Array:
        def collective(x: jax.Array) -> jax.Array:
            return extreme(x, kind, axes)

        return collective(x) if self._order is None else self._order.send(x, collective)

    def _lazily(self, step: Step, ins: list[Shard], number: int) -> Shard:
        """Returns a value that is made, shard by shard, in the layouts in which it is read."""
        factors = step.factors
        assert factors is not None

        def make(want: ValueLayout) -> jax.Array:
            axes = zip(factors.results[number], want.dims, strict=True)
            cut = {factor: dim for factor, dim in axes if factor is not None and dim}
            shards = [
                self.shard(v, ValueLayout(dims_of(dims, cut)))
                for v, dims in zip(ins, factors.operands, strict=True)
            ]
            return factors.compute(step.operation, shards, DevicePiece(cut, self.sizes))[number]

        return Shard(step.results[number], make=make)

    # -- programs within

    def _region(self, step: Step, shards: list[jax.Array]) -> Arrays:
        """Returns the results of a manual region, whose body each device runs."""
        (body,) = step.bodies
        run = lambda shards: self._body(body, (), shards, body.outputs)  # noqa: E731
        return run(shards) if self._order is None else self._order.region(shards, run)

    def _again(self, step: Step, ins: list[Shard]) -> list[Shard]:
        """Recomputes values that were not saved, behind a barrier against reuse of the first."""
        values = [
            v if v.layout.made else Shard(want, self.shard(v, want))
            for v, want in zip(ins, step.operands, strict=True)
        ]
        solid = [v for v in values if not v.layout.made]
        fenced = lax.optimization_barrier([v.x for v in solid])
        new = iter(_values([v.layout for v in solid], fenced))
        return self.run(step.bodies[0], [v if v.layout.made else next(new) for v in values])

    def _scan(self, step: Step, shards: list[jax.Array]) -> Arrays:
        params = step.operation.params
        num_consts, num_carry = scan_parts(step.operation)
        end = num_consts + num_carry
        consts, carry, xs = shards[:num_consts], shards[num_consts:end], shards[end:]
        (body,) = step.bodies
        out = [*step.results[:num_carry]]
        out += [ValueLayout(y.dims[1:]) for y in step.results[num_carry:]]

        def trip(carry: Arrays, x: Arrays) -> tuple[Arrays, Arrays]:
            results = self._body(body, params["jaxpr"].consts, [*consts, *carry, *x], out)
            return results[:num_carry], results[num_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(trip, carry, xs, **options)
        return [*carry, *ys]

    def _while(self, step: Step, shards: list[jax.Array]) -> Arrays:
        params = step.operation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = step.bodies
        of_cond, of_body = shards[:num_cond], shards[num_cond : num_cond + num_body]

        def goes_on(carry: Arrays) -> jax.Array:
            inputs = [*of_cond, *carry]
            return self._body(cond, params["cond_jaxpr"].consts, inputs, [whole(0)])[0]

        def trip(carry: Arrays) -> Arrays:
            inputs = [*of_body, *carry]
            return self._body(body, params["body_jaxpr"].consts, inputs, step.results)

        return lax.while_loop(goes_on, trip, shards[num_cond + num_body :])

    def _cond(self, step: Step, shards: list[jax.Array]) -> Arrays:
        index, *operands = shards

        def branch(body: PartitionedProgram, closed: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
            return lambda *xs: self._body(body, closed.consts, xs, step.results)

        pairs = zip(step.bodies, step.operation.params["branches"], strict=True)
        return lax.switch(index, [branch(*pair) for pair in pairs], *operands)

    def _body(
        self,
        program: PartitionedProgram,
        consts: Arrays,
        xs: Arrays,
        out: Sequence[ValueLayout],
    ) -> list[jax.Array]:
        layouts = program.inputs[len(consts) :]
        order = self._order
        # Bodies are traced on their own: nothing in them waits for operations outside.
        self._order = None if order is None else CollectiveOrder()
        results = self.run(program, [*_whole_values(consts), *_values(layouts, xs)])
        shards = [self.shard(v, want) for v, want in zip(results, out, strict=True)]
        self._order = order
        return shards


def _values(layouts: Sequence[ValueLayout], shards: Arrays) -> list[Shard]:
    return [Shard(layout, x) for layout, x in zip(layouts, shards, strict=True)]


def _whole_values(arrays: Arrays) -> list[Shard]:
    return [Shard(whole(jnp.ndim(x)), x) for x in arrays]


class CollectiveOrder:
    """Orders collectives and loops in trace order by data dependencies, alike on all CPU devices.

    XLA's CPU runtime starts a loop as soon as its operands are ready, concurrently with collectives
    outside of it. JAX gives all collectives of manual regions one channel. Two of them that run at
    once, started in a different order on each device, take each other's data or deadlock: wrong
    numbers were measured (jax 0.10.2). Here a loop waits for the collectives before it, and
    collectives after it wait for the loop. GPUs and TPUs run collectives in program order.
    """

    def __init__(self) -> None:
        self._last: Done | None = None
        self._sent: list[jax.Array] = []

    def send(self, x: jax.Array, collective: Collective) -> jax.Array:
        """Returns `collective(x)`, after the last loop."""
        (result,) = self.send_all([x], lambda operands: [collective(operands[0])])
        return result

    def send_all(self, operands: Arrays, collective: Callable[[Arrays], Arrays]) -> Arrays:
        """Returns `collective(operands)`, one or more results, after the last loop."""
        first, *rest = operands
        results = collective([_after(first, self._last), *rest])
        self._sent.extend(results)
        return results

    def wait(self) -> None:
        """Lets what is sent from here on wait for all that was sent before.

        A loop waits anyway, so that what is gathered for it is not held any earlier.
        """
        self._last, self._sent = _done(self._sent, self._last), []

    def loop(
        self, operands: Arrays, made: Container[int], run: Callable[[list[jax.Array]], Arrays]
    ) -> Arrays:
        """Returns `run(operands)`, which loops, after the collectives before it. The operands at
        `made` are constants, which would be held from the start of the program."""
        self.wait()
        operands = list(operands)
        plain = [i for i, x in enumerate(operands) if _is_plain(x)]
        waits = {i for i in plain if i in made and operands[i].ndim}
        # A select copies what it selects.
        waits |= {*sorted(plain, key=lambda i: (not operands[i].ndim, operands[i].size))[:1]}
        for i in waits:
            operands[i] = _after(operands[i], self._last)
        results = run(operands)
        self._sent, self._last = [], _done([*filter(_is_plain, results)][:1], None) or self._last
        return results

    def region(self, operands: Arrays, run: Callable[[Arrays], Arrays]) -> Arrays:
        """Returns `run(operands)`, which may send before it needs all operands, after the loop and
        the collectives before it. What follows waits for all results."""
        self.wait()
        results = run([_after(x, self._last) for x in operands])
        self._sent.extend(results)
        self.wait()
        return results


class Done(NamedTuple):
    """A number that is known once some arrays are computed, and False, which depends on it."""

    number: jax.Array
    never: jax.Array


def _is_plain(x: jax.Array) -> bool:
    return x.size > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _done(arrays: Arrays, before: Done | None) -> Done | None:
    """Returns what is known once arrays are computed, also those `before`."""
    for x in filter(_is_plain, arrays):
        first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
        number = jnp.real(first).astype(jnp.float32)
        never = (number != number) & (number == number)
        before = Done(number, never if before is None else never | before.never)
    return before


def _after(x: jax.Array, done: Done | None) -> jax.Array:
    """Returns `x` once `done` is known: a select that the compiler cannot fold, even of zeros."""
    if done is None or not _is_plain(x):
        return x
    return lax.select(done.never, lax.full_like(x, done.number.astype(x.dtype)), x)
