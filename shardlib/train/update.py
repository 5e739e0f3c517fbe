"""The update of an optimizer inside of a step, with whatever the optimizer asks for."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from shardlib.errors import ModelError
from shardlib.partition import pin
from shardlib.train.gated import gated_update
from shardlib.train.spikes import keep_unless
from shardlib.train.state import TrainState

Evaluate = Callable[[Any], tuple[jax.Array, Any]]
"""`evaluate(params) -> (loss, gradients)`, of the batch of the step."""


def update(
    state: TrainState, grads: Any, loss: jax.Array, evaluate: Evaluate, good: jax.Array | None
) -> tuple[Any, Any]:
    """Returns the parameters and optimizer state after an update, in the dtypes they had.

    `grads` are in float32 whatever the parameters are, and so is the arithmetic of the update. Each
    device updates the part of a parameter whose optimizer state it holds. Where `good` is there and
    false, all stay as they are.

    An optimizer gets what it asks for by keyword: `value` (the loss), `grad` (the gradients),
    `value_fn(params)` and `grad_fn(params, index)`, which compute the loss and its gradients of the
    same batch, with the same randomness, from other parameters.

    Raises:
        ModelError: If the optimizer takes or needs other arguments.
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
            # What is gathered is chosen before, so that no device holds both whole.
            new_params = pin(new_params, definition.updates, definition.scope)
    return new_params, opt_state


def _optimize(
    optimizer: optax.GradientTransformation,
    loss: jax.Array,
    evaluate: Evaluate,
    grads: Any,
    opt_state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """Returns updates and optimizer state, the state in the dtypes it had."""
    arguments = _arguments(optimizer, loss, evaluate, grads)
    # optax mixes dtypes freely, whatever the user's own code is held to.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            updates, new = optimizer.update(grads, opt_state, params, **arguments)
        except TypeError as error:
            if "argument" not in str(error):
                raise
            raise ModelError(_refusal(optimizer, arguments, error)) from error
    return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, opt_state)


def _arguments(
    optimizer: optax.GradientTransformation, loss: jax.Array, evaluate: Evaluate, grads: Any
) -> dict[str, Any]:
    """Returns what an optimizer asks for by name. One that takes anything, as a chain does, gets
    what line searches and schedules on plateaus need."""
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


def _value_fn(evaluate: Evaluate) -> Callable[[Any], jax.Array]:
    """The loss as a function that JAX differentiates by the gradients of the step, which know of
    microbatches, groups and stages."""

    @jax.custom_vjp
    def value(params: Any) -> jax.Array:
        return evaluate(params)[0]

    def forward(params: Any) -> tuple[jax.Array, Any]:
        loss, grads = evaluate(params)
        return loss, jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)

    def backward(grads: Any, cotangent: jax.Array) -> tuple[Any]:
        return (jax.tree.map(lambda g: g * cotangent.astype(g.dtype), grads),)

    value.defvjp(forward, backward)
    return value


def _refusal(optimizer: Any, arguments: Any, error: TypeError) -> str:
    name = getattr(optimizer.update, "__qualname__", type(optimizer).__name__)
    return (
        f"the optimizer ({name.partition('.')[0]}) cannot be given {', '.join(arguments)}, or "
        f"needs something else: {error}.\n"
        "  Put what evaluates the loss itself outermost, as in optax.contrib.sam(optimizer=chain), "
        "or wrap it so that its update takes **extra."
    )
