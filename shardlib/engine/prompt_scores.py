"""Log probabilities of the tokens of prompts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from shardlib.engine.requests import MOST_LOGPROBS
from shardlib.engine.sampling import Drawn
from shardlib.nn.attention import group_axes
from shardlib.sharding.manual import manual


def prompt_scores(
    logits: Callable[[], Float[Array, "groups rows vocab"]],
    targets: Int[Array, "groups rows"],
    is_wanted: Bool[Array, ""],
) -> Drawn:
    """Returns the log probability of the token after each row, and the likeliest tokens there.

    Args:
        logits: Computes the logits of rows, in any floating-point dtype. It runs if they are
            wanted.
        targets: The token after each row.
        is_wanted: Whether any request wants the scores of its prompt; otherwise they are 0.
    """
    most = min(MOST_LOGPROBS, jax.eval_shape(logits).shape[-1])

    def of_rows(logits: jax.Array, targets: jax.Array) -> Drawn:
        # XLA for TPUs ranks parts of a vocabulary where they lie if rows have one dim.
        flat = logits.astype(jnp.float32).reshape(-1, logits.shape[-1])
        logprobs = jax.nn.log_softmax(flat, axis=-1)
        values, indices = jax.lax.top_k(logprobs, most)
        chosen = jnp.take_along_axis(logprobs, targets.reshape(-1, 1), axis=-1)
        found = Drawn(targets.reshape(-1), chosen[:, 0], indices.astype(jnp.int32), values)
        return jax.tree.map(lambda x: x.reshape(*targets.shape, *x.shape[1:]), found)

    def scores() -> Drawn:
        # XLA for CPUs ranks all rows on each device otherwise.
        axes = group_axes(len(targets))
        by_group = of_rows if not axes else manual(of_rows, axes, P(axes), P(axes))
        return by_group(logits(), targets)

    def zeros() -> Drawn:
        shape = (*targets.shape, most)
        floats = jnp.zeros(targets.shape, jnp.float32), jnp.zeros(shape, jnp.float32)
        return Drawn(targets, floats[0], jnp.zeros(shape, jnp.int32), floats[1])

    return jax.lax.cond(is_wanted, scores, zeros)
