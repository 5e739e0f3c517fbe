"""An optimizer update that can be refused without using more memory.

Selecting between new and old moments after the update takes extra memory: the update of the
parameters reads the new moments too, so a compiler that writes the selected moments over the old
ones has to keep both. Here each leaf of the optimizer state is selected where it is computed, and
later operations read the selected value. If the update is applied, the selected value is the new
one. If it is refused, the results of the later operations are discarded.
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
    """Returns `(updates, opt_state)` of `update(grads, opt_state, params)`, gated by `good`.

    Args:
        update: Returns an optimizer state with the structure, shapes and dtypes of its input.
        good: Whether to take the new state (bool scalar). If false, the result is the old state bit
            for bit, and the updates are meaningless.
        grads, opt_state, params: Arguments of `update`.
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
    # Leaves that share a value, are passed through, or are constants are selected here.
    chosen = [
        new if not isinstance(var, Literal) and var in old_of else jnp.where(good, new, kept)
        for var, new, kept in zip(of_state, jax.tree.leaves(state), old, strict=True)
    ]
    return updates, jax.tree.unflatten(jax.tree.structure(opt_state), chosen)


def _evaluate(closed: Any, arguments: list[Any], choose: Callable[[Any, Any], Any]) -> list[Any]:
    """Retraces a program, replacing each value by `choose(variable, value)`."""
    jaxpr = closed.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        options = equation.primitive.get_bind_params(equation.params)
        # Restores the context of the equation, such as a compute placement.
        with equation.ctx.manager:
            found = equation.primitive.bind(*map(read, equation.invars), **options)
        if not equation.primitive.multiple_results:
            found = [found]
        for var, value in zip(equation.outvars, found, strict=True):
            values[var] = choose(var, value)
    return [read(atom) for atom in jaxpr.outvars]
