"""Layouts through loops, branches and recomputation.

The carry of a loop must have the same layout before and after each trip. It starts with the layout
of its initial value. The walk repeats until a trip keeps the layout, or else moves it back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from shardlib.jaxprs import Operation, scan_parts
from shardlib.partitioner.layout import Layout, whole
from shardlib.partitioner.program import Program, Step

if TYPE_CHECKING:
    from shardlib.partitioner.analyze import Walk

_MAX_TRIPS = 6


def again(walk: "Walk", operation: Operation, ins: list[Layout]) -> Step:
    """Returns the step of a recomputation in the backward pass, from saved values."""
    operands = [layout.complete() for layout in ins]
    wanted = [walk.wanted(v) for v in operation.outvars]
    body = walk.analysis.program(operation.params["jaxpr"], operands, wanted)
    return Step(operation, tuple(operands), body.outputs, bodies=(body,))


def scan(walk: "Walk", operation: Operation, ins: list[Layout]) -> Step:
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
    found = [walk.wanted(v) for v in operation.outvars[num_carry:]]
    wanted = [None] * num_carry + [dims[1:] if dims else None for dims in found]

    def trip(carry: Sequence[Layout]) -> Program:
        return walk.analysis.closed(closed, [*consts, *carry, *rows], wanted)

    carry, body = _fixpoint(trip, init, sums_may_wait=True)
    ys = [Layout(((), *y.dims)) for y in body.outputs[num_carry:]]
    return Step(operation, (*consts, *carry, *xs), (*carry, *ys), bodies=(body,))


def while_loop(walk: "Walk", operation: Operation, ins: list[Layout]) -> Step:
    """Returns the step of a while loop; its condition is whole, for equal trips on all devices."""
    operation, ins = _with_one_condition(operation, ins)
    params = operation.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    consts = [walk.used(x).complete() for x in ins[: num_cond + num_body]]
    init = [walk.used(layout) for layout in ins[num_cond + num_body :]]

    def trip(carry: Sequence[Layout]) -> Program:
        return walk.analysis.closed(params["body_jaxpr"], [*consts[num_cond:], *carry])

    carry, body = _fixpoint(trip, init, sums_may_wait=False)
    cond = walk.analysis.closed(params["cond_jaxpr"], [*consts[:num_cond], *carry])
    return Step(operation, (*consts, *carry), tuple(carry), bodies=(cond, body))


def _with_one_condition(operation: Operation, ins: list[Layout]) -> tuple[Operation, list[Layout]]:
    """Returns a loop that goes on while any of its rows does.

    The `vmap` of a loop may have a condition for each row: a row keeps its values once it has
    ended.
    """
    params = operation.params
    cond, body, count = params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"]
    if not cond.out_avals[0].shape:
        return operation, ins
    start = -len(body.out_avals)

    def any_goes_on(*arguments: Any) -> jax.Array:
        return jnp.any(jaxpr_as_fun(cond)(*arguments)[0])

    def trip(*arguments: Any) -> list[jax.Array]:
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


def cond(walk: "Walk", operation: Operation, ins: list[Layout]) -> Step:
    """Returns the step of a conditional: all branches use the layout that cuts a result most."""
    operands = [walk.used(layout).solid().complete() for layout in ins[1:]]
    wanted = [walk.wanted(v) for v in operation.outvars]
    bodies = [walk.analysis.closed(b, operands, wanted) for b in operation.params["branches"]]
    outputs = zip(*(body.outputs for body in bodies), strict=True)
    results = [Layout(max(branches, key=lambda x: len(x.axes)).dims) for branches in outputs]
    return Step(operation, (whole(0), *operands), tuple(results), bodies=tuple(bodies))


def _fixpoint(
    trip: Callable[[Sequence[Layout]], Program], init: Sequence[Layout], *, sums_may_wait: bool
) -> tuple[list[Layout], Program]:
    """Returns layouts of the carry that a trip keeps or can be moved back to, and the trip.

    A sum may stay pending through a loop that begins at zero: the weights of a recurrent network
    accumulate their gradient over all trips, and it is sent once.
    """
    carry = [layout.complete().solid(keep_zero=sums_may_wait) for layout in init]
    for number in range(_MAX_TRIPS):
        body = trip(carry)
        pairs = zip(carry, body.outputs, strict=False)
        found = [_next(old, new, number, sums_may_wait) for old, new in pairs]
        # The carry is zero on the first trip alone: layouts that depend on it are walked again.
        if found == carry:
            return found, body
        carry = found
    carry = [Layout(layout.dims) for layout in carry]
    return carry, trip(carry)


def _next(old: Layout, new: Layout, number: int, sums_may_wait: bool) -> Layout:
    """Returns the layout of a carry on the next trip, from its layouts before and after a trip.

    It follows the trip at first; later it only loses axes, so that the walk ends.
    """
    pending = new.pending if sums_may_wait and (old.zero or old.pending) else frozenset[str]()
    if number >= 2:
        pending &= old.pending
    dims = new.dims if number == 1 or len(new.axes) > len(old.axes) else old.dims
    if number >= 3:
        dims = tuple(a if a == b else () for a, b in zip(old.dims, new.dims, strict=True))
    return Layout(dims, pending.difference(*dims))
