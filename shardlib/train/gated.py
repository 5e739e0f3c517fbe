"""An optimizer's update that can be refused, in no more memory than one that cannot.

Choosing between a new and an old moment after the update is not enough: the update of the
parameters reads the new moments too, and a compiler that writes the chosen ones over the old would
have to keep both. Here each leaf of the optimizer state is chosen where it is computed, and what
follows reads what was chosen. Where the update is applied the two are the same; where it is
refused, what follows is thrown away.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal


def gated_update(
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    good: jax.Array,
    grads: Any,
    opt_state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """Returns what `update(grads, opt_state, params)` does: `(updates, opt_state)`.

    Args:
        update: Returns an optimizer state of the structure, shapes and dtypes that it is given.
        good: Whether the state is the new one (bool scalar). Where it is not, the state is the old
            one bit for bit, and the updates mean nothing.
        grads, opt_state, params: What it is called with.
    """
    arguments = grads, opt_state, params
    closed, shape = jax.make_jaxpr(update, return_shape=True)(*arguments)
    old = jax.tree.leaves(opt_state)
    computed = {var for equation in closed.jaxpr.eqns for var in equation.outvars}
    of_state = closed.jaxpr.outvars[-len(old) :] if old else []
    old_of = {
        var: value
        for var, value in zip(of_state, old, strict=True)
        if not isinstance(var, Literal) and var in computed and of_state.count(var) == 1
    }

    def choose(var: Any, value: Any) -> Any:
        return jnp.where(good, value, old_of[var]) if var in old_of else value

    values = _evaluate(closed, jax.tree.leaves(arguments), choose)
    updates, state = jax.tree.unflatten(jax.tree.structure(shape), values)
    # Two leaves of one value, and a leaf that is passed on or made of nothing, are chosen here.
    chosen = [
        new if not isinstance(var, Literal) and var in old_of else jnp.where(good, new, kept)
        for var, new, kept in zip(of_state, jax.tree.leaves(state), old, strict=True)
    ]
    return updates, jax.tree.unflatten(jax.tree.structure(opt_state), chosen)


def _evaluate(closed: Any, arguments: list[Any], choose: Callable[[Any, Any], Any]) -> list[Any]:
    """Traces a program again, with each of its values as `choose(variable, value)` has it."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        options = equation.primitive.get_bind_params(equation.params)
        # What the equation was traced under, such as a place to compute it at.
        with equation.ctx.manager:
            found = equation.primitive.bind(*map(read, equation.invars), **options)
        if not equation.primitive.multiple_results:
            found = [found]
        for var, value in zip(equation.outvars, found, strict=True):
            values[var] = choose(var, value)
    return [read(atom) for atom in jaxpr.outvars]
