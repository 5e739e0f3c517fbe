"""Log probabilities of the tokens of prompts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shardlib.engine.by_rows import by_rows
from shardlib.engine.requests import MOST_LOGPROBS
from shardlib.engine.sampling import Drawn


def prompt_scores(
    logits: Callable[[], Float[Array, "groups rows vocab"]],
    targets: Int[Array, "groups rows"],
    is_wanted: Bool[Array, ""],
) -> Drawn:
    """Returns the log probability of the token after each row, and the likeliest tokens there.
    `logits` computes the logits of rows, in any floating-point dtype, if any request wants the
    scores of its prompt; otherwise they are 0."""
    most = min(MOST_LOGPROBS, jax.eval_shape(logits).shape[-1])

    def of_rows(logits: jax.Array, targets: jax.Array) -> Drawn:
        logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        values, indices = jax.lax.top_k(logprobs, most)
        chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
        return Drawn(targets, chosen, indices.astype(jnp.int32), values)

    def scores() -> Drawn:
        return by_rows(of_rows, logits(), targets)

    def zeros() -> Drawn:
        shape = (*targets.shape, most)
        floats = jnp.zeros(targets.shape, jnp.float32), jnp.zeros(shape, jnp.float32)
        return Drawn(targets, floats[0], jnp.zeros(shape, jnp.int32), floats[1])

    return jax.lax.cond(is_wanted, scores, zeros)
