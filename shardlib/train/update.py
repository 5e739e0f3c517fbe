"""The optimizer update inside a step, with the keyword arguments that the optimizer takes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from shardlib.errors import ModelError
from shardlib.sharding.partition import pin
from shardlib.train.gated import gated_update
from shardlib.train.spikes import keep_unless
from shardlib.train.state import TrainState

Evaluate = Callable[[Any], tuple[jax.Array, Any]]
"""`evaluate(params) -> (loss, gradients)` on the batch of the step."""


def update(
    state: TrainState, grads: Any, loss: jax.Array, evaluate: Evaluate, good: jax.Array | None
) -> tuple[Any, Any]:
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
    grads: Any,
    opt_state: Any,
    params: Any,
) -> tuple[Any, Any]:
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
    optimizer: optax.GradientTransformation, loss: jax.Array, evaluate: Evaluate, grads: Any
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


def _value_fn(evaluate: Evaluate) -> Callable[[Any], jax.Array]:
    """Returns the loss as a function whose gradient is the gradient of the step, which handles
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
        "  Put the transformation that evaluates the loss outermost, as in "
        "optax.contrib.sam(optimizer=chain), or wrap it so that its update takes **extra."
    )
