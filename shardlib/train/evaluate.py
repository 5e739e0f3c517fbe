"""Evaluation: metrics of held-out batches, added up exactly."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.losses import Mean
from shardlib.train.loop import must_block
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
        before, totals = totals, sums if totals is None else _add(totals, sums)
        # One batch is worked on while the next is read: with more, they would fill the devices.
        jax.block_until_ready(totals if must_block() else before)
    return {name: float(mean.value) for name, mean in jax.device_get(totals or {}).items()}


@jax.jit
def _add(totals: dict[str, Mean], sums: dict[str, Mean]) -> dict[str, Mean]:
    return jax.tree.map(jnp.add, totals, sums)
