"""Calling conventions of loss functions."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import PyTree

from shardlib.errors import ModelError

LossFn = Callable[..., Any]
"""`loss_fn(model, batch, rng, *inputs)`; see `make_train_step`."""
Inputs = tuple[Any, ...]
"""Extra inputs of a loss: pytrees of arrays, the same for every part of a batch."""


def called_by_position(loss_fn: LossFn) -> LossFn:
    """Returns a loss that takes a key, even if `loss_fn(model, batch)` does not.

    Raises:
        ModelError: If `loss_fn` takes fewer than two arguments.
    """
    if _accepts(loss_fn, 3) or _accepts(loss_fn, 4):
        return loss_fn
    if not _accepts(loss_fn, 2):
        # More arguments than a model, a batch and a key are inputs; the first call checks them.
        if callable(loss_fn) and any(_accepts(loss_fn, n) for n in range(5, 17)):
            return loss_fn
        name = getattr(loss_fn, "__name__", repr(loss_fn))
        raise ModelError(
            f"the loss function {name} cannot be called as loss_fn(model, batch).\n"
            "  Let it take (model, batch), (model, batch, rng) or (model, batch, rng, *inputs)."
        )

    def without_key(model: Any, batch: PyTree, rng: jax.Array) -> PyTree:
        return loss_fn(model, batch)

    return without_key


def check_arity(loss_fn: LossFn, inputs: Inputs) -> None:
    """Raises `ModelError` if the loss does not accept the number of inputs passed to the step."""
    if not _accepts(loss_fn, 3 + len(inputs)):
        raise ModelError(
            f"the step was given {len(inputs)} inputs after the batch, but the loss function does "
            f"not take {3 + len(inputs)} arguments.\n"
            "  Call step(state, batch, *inputs) with what loss_fn(model, batch, rng, *inputs) "
            "takes."
        )


def _accepts(fn: Any, count: int) -> bool:
    try:
        signature = inspect.signature(fn)
    except ValueError:
        return True  # Not written in Python: the call itself will fail.
    except TypeError:
        return False
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
