"""Evaluation: metrics of held-out batches, added up exactly."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.losses import Mean
from shardlib.train.state import TrainState


def evaluate(
    step: Callable[[TrainState, Any], dict[str, Mean]], state: TrainState, batches: Iterable[Any]
) -> dict[str, float]:
    """Returns the weighted mean of each metric over batches.

    Args:
        step: What `make_eval_step` returns.
        state: The state to evaluate.
        batches: Held-out batches; padding weighs nothing.
    """
    totals: dict[str, Mean] | None = None
    for batch in batches:
        sums = step(state, batch)
        totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
    return {name: float(mean.value) for name, mean in jax.device_get(totals or {}).items()}
