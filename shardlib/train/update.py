"""The optimizer update inside a step, with the keyword arguments that the optimizer takes.

An update can be refused without using more memory. Selecting between new and old moments after the
update takes extra memory: the update of the parameters reads the new moments too, so a compiler
that writes the selected moments over the old ones has to keep both. Here each leaf of the optimizer
state is selected where it is computed, and later operations read the selected value. If the update
is applied, the selected value is the new one. If it is refused, the results of the later operations
are discarded.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.jaxprs import bind_again
from shardlib.sharding.partition import pin
from shardlib.train.guards import keep_unless
from shardlib.train.state import TrainState

Evaluate = Callable[[PyTree], tuple[jax.Array, PyTree]]
"""`evaluate(params) -> (loss, gradients)` on the batch of the step."""


def update(
    state: TrainState, grads: PyTree, loss: jax.Array, evaluate: Evaluate, good: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Returns the parameters and optimizer state after an update, with unchanged dtypes.

    `grads` and the arithmetic of the update are in float32, whatever the dtype of the parameters.
    Each device updates the part of a parameter whose optimizer state it holds. If `good` is given
    and false, nothing changes.

    The optimizer receives the keyword arguments that it takes: `value` (the loss), `grad` (the
    gradients), `value_fn(params)` and `grad_fn(params, index)`. The two functions compute the loss
    and its gradients at other parameters, on the same batch and with the same randomness.

    Raises:
        ModelError: If the optimizer rejects these arguments or needs others.
    """
    definition = state.definition
    params = state.params
    is_apart = definition.scope.rules.opt_state is not None
    if is_apart:
        grads = pin(grads, definition.updates, definition.scope)
        params = pin(params, definition.updates, definition.scope)
    run = functools.partial(_optimize, definition.optimizer, loss, evaluate)
    if good is None:
        updates, opt_state = run(grads, state.opt_state, params)
    else:
        updates, opt_state = gated_update(run, good, grads, state.opt_state, params)
    with jax.numpy_dtype_promotion("standard"):
        new_params = optax.apply_updates(params, updates)
    if good is not None:
        new_params = keep_unless(good, new_params, params)
        if is_apart:
            # Selected before gathering, so that no device holds both full parameters.
            new_params = pin(new_params, definition.updates, definition.scope)
    return new_params, opt_state


def _optimize(
    optimizer: optax.GradientTransformation,
    loss: jax.Array,
    evaluate: Evaluate,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the optimizer state, with its dtypes unchanged."""
    arguments = _arguments(optimizer, loss, evaluate, grads)
    # optax mixes dtypes freely, whatever promotion rules the user's code sets.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            updates, new = optimizer.update(grads, opt_state, params, **arguments)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise ModelError(_refusal(optimizer, arguments, error)) from error
    return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, opt_state)


def _arguments(
    optimizer: optax.GradientTransformation, loss: jax.Array, evaluate: Evaluate, grads: PyTree
) -> dict[str, Any]:
    """Returns the keyword arguments that an optimizer takes. An optimizer that takes any, such as a
    chain, gets the arguments of line searches and plateau schedules."""
    parameters = inspect.signature(optimizer.update).parameters.values()
    names = {p.name for p in parameters}
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        names |= {"value", "grad", "value_fn"}
    offered = {
        "value": loss,
        "grad": grads,
        "value_fn": _value_fn(evaluate),
        "grad_fn": lambda params, index=0: evaluate(params)[1],
    }
    return {name: x for name, x in offered.items() if name in names}


def _value_fn(evaluate: Evaluate) -> Callable[[PyTree], jax.Array]:
    """Returns the loss as a function whose gradient is the gradient of the step, which handles
    microbatches, groups and stages."""

    @jax.custom_vjp
    def value(params: PyTree) -> jax.Array:
        return evaluate(params)[0]

    def forward(params: PyTree) -> tuple[jax.Array, PyTree]:
        loss, grads = evaluate(params)
        return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    def backward(grads: PyTree, cotangent: jax.Array) -> tuple[PyTree]:
        return (jax.tree.map(lambda g: g * cotangent.astype(g.dtype), grads),)

    value.defvjp(forward, backward)
    return value


def _refusal(
    optimizer: optax.GradientTransformation, arguments: dict[str, Any], error: TypeError
) -> str:
    name = getattr(optimizer.update, "__qualname__", type(optimizer).__name__)
    return (
        f"the optimizer ({name.partition('.')[0]}) cannot be given {', '.join(arguments)}, or "
        f"needs something else: {error}.\n"
        "  Put the transformation that evaluates the loss outermost, as in "
        "optax.contrib.sam(optimizer=chain), or wrap it so that its update takes **extra."
    )


def gated_update(
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]],
    good: jax.Array,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
) -> tuple[PyTree, PyTree]:
    """Returns `(updates, opt_state)` of `update(grads, opt_state, params)`, gated by `good`, a bool
    scalar. If it is false, the result is the old state bit for bit, and the updates are
    meaningless. Structure, shapes and dtypes of the state stay."""
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

    def choose(var: Var, value: jax.Array) -> jax.Array:
        return jnp.where(good, value, old_of[var]) if var in old_of else value

    values = _evaluate(closed, jax.tree.leaves(arguments), choose)
    updates, state = jax.tree.unflatten(jax.tree.structure(shape), values)
    # Leaves that share a value, are passed through, or are constants are selected here.
    chosen = [
        new if not isinstance(var, Literal) and var in old_of else jnp.where(good, new, kept)
        for var, new, kept in zip(of_state, jax.tree.leaves(state), old, strict=True)
    ]
    return updates, jax.tree.unflatten(jax.tree.structure(opt_state), chosen)


def _evaluate(
    closed: ClosedJaxpr,
    arguments: list[jax.Array],
    choose: Callable[[Var, jax.Array], jax.Array],
) -> list[Any]:
    """Retraces a program, replacing each value by `choose(variable, value)`."""
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        results = bind_again(equation, list(map(read, equation.invars)))
        for var, value in zip(equation.outvars, results, strict=True):
            values[var] = choose(var, value)
    return [read(atom) for atom in jaxpr.outvars]
