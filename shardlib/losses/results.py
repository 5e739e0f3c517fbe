"""The result of a loss function, as sums over its batch."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.losses.aggregate import Aggregate, Max, Mean, Min, Output, Sum

Sums = dict[str, Aggregate]

_RESERVED = frozenset({"loss", "grad_norm", "learning_rate", "pipeline_bubble", "skipped"})
"""Metrics that a step reports itself."""


def loss_mean(sums: Sums) -> Mean:
    """Returns the loss from the sums."""
    mean = sums["loss"]
    assert isinstance(mean, Mean)
    return mean


def loss_sums(result: object, part: PyTree) -> Sums:
    """Returns the result of a loss function as one dict, with the loss as `"loss"`.

    Names in nested dicts are joined with slashes. `part` is the batch of the loss, for the number
    of rows of an `Output`.

    Raises:
        ModelError: If the result has another form. The message names every fault of the metrics.
    """
    loss, aux = result, {}
    if isinstance(result, tuple) and not isinstance(result, Aggregate) and len(result) == 2:
        loss, aux = result
    if type(result) is tuple and len(result) != 2:
        raise ModelError(
            f"the loss function returned a tuple of {len(result)}.\n"
            "  Return the loss, or (loss, {name: scalar or Mean})."
        )
    if not isinstance(aux, Mapping):
        raise ModelError(
            f"the loss function returned the loss and {type(aux).__name__}, not a dict.\n"
            "  Return the loss, or (loss, {name: scalar or Mean})."
        )
    flat = _flat(aux)
    names = [name for name, _ in flat]
    taken = sorted(_RESERVED & set(names))
    if taken:
        raise ModelError(
            f"the loss function names a metric {', '.join(map(repr, taken))}, which the step "
            "reports itself.\n  Rename it."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ModelError(
            f"the loss function names {', '.join(map(repr, twice))} twice, once inside of a nested "
            "dict.\n  Rename one of the two."
        )
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(part) if leaf.shape}
    return {**{name: _aggregate(name, x, rows) for name, x in flat}, "loss": _loss(loss)}


def _flat(aux: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns the values of nested dicts with their names joined by slashes."""
    flat: list[tuple[str, Any]] = []
    for name, value in aux.items():
        path = f"{prefix}{name}"
        flat += _flat(value, f"{path}/") if isinstance(value, Mapping) else [(path, value)]
    return flat


def _loss(value: object) -> Mean:
    if isinstance(value, Sum | Max | Min | Output):
        raise ModelError(
            f"the loss is a {type(value).__name__}, which is not differentiated.\n"
            "  Return a scalar, or Mean(total, weight) of two scalars."
        )
    return _as_mean("loss", value)


def _aggregate(name: str, value: object, rows: set[int]) -> Aggregate:
    if isinstance(value, Output):
        array = jnp.asarray(value.value)
        if not array.shape or array.shape[0] not in rows:
            raise ModelError(
                f"the loss function returned the output {name!r} of shape {array.shape}, but the "
                f"batch has {' or '.join(map(str, sorted(rows)))} rows here.\n"
                "  Return an array [rows, ...]; report other arrays as Sum, Max or Min."
            )
        return Output(array)
    if isinstance(value, Sum | Max | Min):
        array = jnp.asarray(value.value)
        if array.dtype == jnp.bool:
            array = array.astype(jnp.int32)
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return type(value)(array.astype(jnp.float32) if is_float else array)
    return _as_mean(name, value)


def _as_mean(name: str, value: object) -> Mean:
    pair = value if isinstance(value, Mean) else (value, 1.0)
    try:
        total, weight = (jnp.asarray(x, jnp.float32) for x in pair)
    except (TypeError, ValueError):
        raise ModelError(
            f"the loss function returned {name!r} as {type(value).__name__}, which is not a "
            "number.\n  Return a scalar or a Mean; leave out other values."
        ) from None
    if total.shape or weight.shape:
        raise ModelError(
            f"the loss function returned {name!r} of shape {total.shape or weight.shape}.\n"
            "  Reduce it to a scalar, or to Mean(total, weight) of two scalars"
            + ("." if name == "loss" else "; return rows as Output(array).")
        )
    return Mean(total, weight)


def refuse_integer_loss(result: object) -> None:
    """Raises `ModelError` for a loss of integers: its gradient would be 0 everywhere."""
    loss = result[0] if type(result) is tuple and result else result
    dtype = getattr(loss.total if isinstance(loss, Mean) else loss, "dtype", None)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ModelError(
            f"the loss is {dtype.name}, which has no gradient.\n"
            "  Return a float computed from the outputs of the model, and counts as metrics."
        )
