"""Calling conventions of loss functions."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import PyTree

from shardlib.errors import ModelError, ShardlibError
from shardlib.paths import named_leaves

_NOTED = 8  # Leaves of a batch.

LossFn = Callable[..., Any]
"""`loss_fn(model, batch, rng, *inputs)`; see `make_train_step`."""
Inputs = tuple[Any, ...]
"""Extra inputs of a loss: pytrees of arrays, the same for every part of a batch."""


def called_by_position(loss_fn: LossFn) -> LossFn:
    """Returns a loss that takes a key, even if `loss_fn(model, batch)` does not.

    Raises:
        ModelError: If `loss_fn` takes fewer than two arguments, or the batch before the model.
    """
    _check_order(loss_fn)
    if _accepts(loss_fn, 3) or _accepts(loss_fn, 4):
        return loss_fn
    if not _accepts(loss_fn, 2):
        # More arguments than a model, a batch and a key are inputs; the first call checks them.
        if callable(loss_fn) and any(_accepts(loss_fn, n) for n in range(5, 17)):
            return loss_fn
        raise ModelError(
            f"the loss function {_name(loss_fn)} cannot be called as loss_fn(model, batch).\n"
            "  Let it take (model, batch), (model, batch, rng) or (model, batch, rng, *inputs)."
        )

    def without_key(model: Any, batch: PyTree, rng: jax.Array) -> PyTree:
        return loss_fn(model, batch)

    return without_key


def _check_order(loss_fn: LossFn) -> None:
    """Raises `ModelError` if the names of its parameters say that a loss takes the batch first."""
    try:
        names = list(inspect.signature(loss_fn).parameters)[:2]
    except (TypeError, ValueError):
        return
    if names[:1] == ["batch"] or names[1:] == ["model"]:
        raise ModelError(
            f"the loss function {_name(loss_fn)} takes ({', '.join(names)}), but is called as "
            "loss_fn(model, batch).\n  Let its first two parameters be the model and the batch."
        )


@contextlib.contextmanager
def noting(model: str, batch: PyTree) -> Iterator[None]:
    """Adds to an error of a loss what the loss was called with: the name of its model, and the
    paths, dtypes and shapes of the first leaves of its batch."""
    try:
        yield
    except ShardlibError:
        raise
    except Exception as error:
        leaves = [f"{path} {x.dtype}{list(x.shape)}" for path, x in named_leaves(batch).items()]
        more = ", ..." if len(leaves) > _NOTED else ""
        error.add_note(
            f"The loss was called as loss_fn(model, batch) with a {model} and a batch of "
            f"{', '.join(leaves[:_NOTED])}{more}."
        )
        raise


def called_without_inputs(loss_fn: LossFn) -> LossFn:
    """Returns a loss of a model, a batch and a key.

    Raises:
        ModelError: If `loss_fn` takes inputs as well, or cannot be called.
    """
    loss = called_by_position(loss_fn)
    if not _accepts(loss, 3):
        raise ModelError(
            f"the loss function {_name(loss_fn)} takes inputs besides the model, the batch and the "
            "key, which are not known before a run.\n"
            "  Give a function of (model, batch, rng) that holds them."
        )
    return loss


def _name(loss_fn: Any) -> str:
    return getattr(loss_fn, "__name__", repr(loss_fn))


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
