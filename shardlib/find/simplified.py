"""Simplifications that compilers make in the program of a device: repeats, and sums of sums."""

import collections
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from shardlib.cost.traced.primitives import COLLECTIVES
from shardlib.jaxprs import is_literal, subprograms

_FENCES = frozenset(("optimization_barrier",))
_ADDITIONS = frozenset(("add", "add_any"))
_SUMS = frozenset(("psum", "psum_invariant", "reduce_scatter", "psum_scatter"))


def without_repeats(program: Jaxpr) -> Jaxpr:
    """Returns a program in which equal operations are one, as compilers make them: a parameter
    that two passes gather alike is gathered once."""
    made: dict[tuple, Sequence[Any]] = {}
    same: dict[Any, Any] = {}
    equations = []

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else same.get(atom, atom)

    for equation in program.eqns:
        equation = equation.replace(invars=[read(v) for v in equation.invars])
        name = equation.primitive.name
        if name in COLLECTIVES or not (
            equation.effects or name in _FENCES or any(subprograms(equation))
        ):
            read_here = ((v.val, v.aval) if is_literal(v) else id(v) for v in equation.invars)
            key = name, *map(str, read_here), str(equation.params)
            if key in made:
                same.update(zip(equation.outvars, made[key], strict=True))
                continue
            made[key] = equation.outvars
        equations.append(equation)
    return program.replace(eqns=equations, outvars=[read(v) for v in program.outvars])


def summed_once(program: Jaxpr) -> Jaxpr:
    """Returns a program that adds first what it would sum over devices twice and then add, as the
    gradients of a parameter that is read twice.

    XLA does so in its passes `AllReduceReassociate` and `ReduceScatterReassociate`, in bodies of
    loops too.
    """
    program = program.replace(eqns=[_with_body_summed_once(e) for e in program.eqns])
    uses = collections.Counter(v for e in program.eqns for v in e.invars if not is_literal(v))
    uses.update(v for v in program.outvars if not is_literal(v))
    chains: dict[Any, Sequence[Any]] = {}
    """The sum over devices behind a value, and the transpositions after it."""
    gone: set[Any] = set()
    equations = []
    for equation in program.eqns:
        name, ins, outs = equation.primitive.name, equation.invars, equation.outvars
        before: list[Sequence[Any]] = [
            () if is_literal(v) or uses[v] > 1 else chains.get(v, ()) for v in ins
        ]
        equations.append(equation)
        if name in _SUMS and len(ins) == 1:
            chains[outs[0]] = (equation,)
        elif name == "transpose" and before[0]:
            chains[outs[0]] = (*before[0], equation)
        elif name in _ADDITIONS and all(before) and _alike(*before):
            gone.update(v for chain in before for e in chain for v in e.outvars)
            value = Var(before[0][0].invars[0].aval)
            terms = [chain[0].invars[0] for chain in before]
            equations[-1] = equation.replace(invars=terms, outvars=[value])
            chain: list[Any] = []
            for one in before[0]:
                last = one is before[0][-1]
                made = outs[0] if last else Var(one.outvars[0].aval)
                chain.append(one.replace(invars=[value], outvars=[made]))
                value = made
                uses[value] += not last
            equations += chain
            chains[outs[0]] = chain
    return program.replace(eqns=[e for e in equations if gone.isdisjoint(e.outvars)])


def _with_body_summed_once(equation: JaxprEqn) -> JaxprEqn:
    if equation.primitive.name != "scan":
        return equation
    body = equation.params["jaxpr"]
    body = body.replace(jaxpr=summed_once(body.jaxpr))
    return equation.replace(params={**equation.params, "jaxpr": body})


def _alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns whether two chains of operations do the same to arrays of one type."""
    if len(one) != len(other) or one[0].invars[0].aval != other[0].invars[0].aval:
        return False
    pairs = zip(one, other, strict=True)
    return all(a.primitive is b.primitive and str(a.params) == str(b.params) for a, b in pairs)


def selected(program: Jaxpr) -> Jaxpr:
    """Returns a program that adds one number to each row by comparing positions, as TPU compilers
    do instead of a scatter: elementwise, so that nothing is written for it alone.

    It is how the gradient of the logits of the right ids begins; XLA for GPUs keeps the scatter.
    """
    equations = []
    for equation in program.eqns:
        if not _adds_one_a_row(equation):
            equations.append(equation)
            continue
        (axis,) = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
        avals: list[Any] = [v.aval for v in equation.invars]
        add = functools.partial(_add_one_a_row, axis=axis)
        added = jax.make_jaxpr(add)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in avals)).jaxpr
        inside = dict(zip(added.invars, equation.invars, strict=True))
        inside[added.outvars[0]] = equation.outvars[0]
        for one in added.eqns:
            ins = [v if is_literal(v) else inside.get(v, v) for v in one.invars]
            outs = [inside.get(v, v) for v in one.outvars]
            source = equation.source_info
            equations.append(one.replace(invars=ins, outvars=outs, source_info=source))
    return program.replace(eqns=equations)


def _adds_one_a_row(equation: Any) -> bool:
    if equation.primitive.name != "scatter-add":
        return False
    shape = equation.invars[0].aval.shape
    numbers, indices = equation.params["dimension_numbers"], equation.invars[1].aval
    rows = [shape[dim] for dim in numbers.operand_batching_dims]
    return (
        not numbers.update_window_dims
        and len(numbers.scatter_dims_to_operand_dims) == 1
        and len(rows) == len(shape) - 1
        and indices.size == math.prod(rows)
    )


def _add_one_a_row(values: Any, indices: Any, updates: Any, *, axis: int) -> Any:
    """Adds an update to the element of each row that an index names."""
    one = [1 if dim == axis else size for dim, size in enumerate(values.shape)]
    place = lax.broadcasted_iota(indices.dtype, values.shape, axis)
    is_there = lax.eq(place, jnp.broadcast_to(lax.reshape(indices, one), values.shape))
    update = jnp.broadcast_to(lax.reshape(updates, one), values.shape)
    return lax.add(values, lax.select(is_there, update, lax.full_like(values, 0)))
