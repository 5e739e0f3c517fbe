"""Tokens drawn from logits, each row by its own settings."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from shardlib.engine.requests import MOST_LOGPROBS

_BLOCK = 128
"""Logits of which the largest one is found together."""


class Settings(NamedTuple):
    """How each row draws; see `requests.Sampling`."""

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    seed: UInt32[Array, " rows"]
    wants_top: Int[Array, " rows"]
    """Whether a row returns the likeliest tokens, 0 or 1."""


class Drawn(NamedTuple):
    """The drawn tokens and their log probabilities."""

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]
    top_tokens: Int[Array, "rows most"]
    """The likeliest tokens of each row, if any row wants them; otherwise 0."""
    top_logprobs: Float[Array, "rows most"]


def draw(
    logits: Float[Array, "rows vocab"],
    settings: Settings,
    positions: Int[Array, " rows"],
    added: Float[np.ndarray | Array, "rows vocab"] | None = None,
) -> Drawn:
    """Returns a token for each row. It depends on the logits, settings and position of its row.

    Args:
        logits: In any floating-point dtype; probabilities are float32.
        settings: Of each row.
        positions: The position of the token that is drawn.
        added: Added to the logits of the choice, and not to the log probabilities.
    """
    logits = logits.astype(jnp.float32)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.log(jnp.sum(jnp.exp(logits - peak), axis=-1, keepdims=True))

    def logprobs(of_tokens: jax.Array) -> jax.Array:
        return of_tokens - peak - total

    model_logits = logits
    if added is not None:
        logits = logits + added
    likeliest = _likeliest(logits)
    is_drawn = settings.temperature > 0

    def drawn() -> jax.Array:
        # The likeliest is 0, which no temperature makes infinite; below `tiny` one may count as 0.
        below = logits - jnp.max(logits, axis=-1, keepdims=True)
        least = jnp.maximum(settings.temperature, jnp.finfo(jnp.float32).tiny)
        scaled = below / jnp.where(is_drawn, least, 1.0)[:, None]
        tokens = jax.vmap(_categorical)(_cut(scaled, settings), settings.seed, positions)
        return jnp.where(is_drawn, tokens, likeliest)

    tokens = jax.lax.cond(jnp.any(is_drawn), drawn, lambda: likeliest)
    most = min(MOST_LOGPROBS, logits.shape[-1])

    def top() -> tuple[jax.Array, jax.Array]:
        values, indices = jax.lax.top_k(model_logits, most)
        return indices.astype(jnp.int32), logprobs(values)

    def none() -> tuple[jax.Array, jax.Array]:
        shape = (logits.shape[0], most)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top_tokens, top_logprobs = jax.lax.cond(jnp.any(settings.wants_top > 0), top, none)
    chosen = logprobs(jnp.take_along_axis(model_logits, tokens[:, None], axis=-1))[:, 0]
    return Drawn(tokens, chosen, top_tokens, top_logprobs)


def _likeliest(logits: jax.Array) -> jax.Array:
    """Returns the first of the largest logits of each row: the block of the largest one, then its
    place there. XLA for CPU makes vector instructions of a maximum, and none of an argmax."""
    rows, vocab = logits.shape
    blocks = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    blocks = blocks.reshape(rows, -1, _BLOCK)
    number = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1, keepdims=True).astype(jnp.int32)
    block = jnp.take_along_axis(blocks, number[..., None], axis=1)[:, 0]
    return number[:, 0] * _BLOCK + jnp.argmax(block, axis=-1).astype(jnp.int32)


def _categorical(logits: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _cut(scaled: jax.Array, settings: Settings) -> jax.Array:
    """Returns scaled logits with -inf for tokens that are not to be chosen."""
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    # p >= min_p * max p, in logs; the log of 0 is -inf, which keeps all.
    least = peak + jnp.log(settings.min_p)[:, None]
    has_ranks = (settings.top_k > 0) | (settings.top_p < 1)
    ranked = jax.lax.cond(
        jnp.any(has_ranks),
        lambda: _least_by_rank(scaled, settings),
        lambda: jnp.full_like(least, -jnp.inf),
    )
    return jnp.where(scaled >= jnp.maximum(least, ranked), scaled, -jnp.inf)


def _least_by_rank(scaled: jax.Array, settings: Settings) -> jax.Array:
    """Returns the least scaled logit that `top_k` and `top_p` keep: [rows, 1]."""
    vocab = scaled.shape[-1]
    ordered = -jnp.sort(-scaled, axis=-1)
    count = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab)
    is_kept = jnp.arange(vocab, dtype=jnp.int32)[None] < count[:, None]
    shares = jax.nn.softmax(jnp.where(is_kept, ordered, -jnp.inf), axis=-1)
    # A token is kept while those before it have less than the share.
    before = jnp.cumsum(shares, axis=-1) - shares
    is_kept &= (before < settings.top_p[:, None]) | (settings.top_p >= 1)[:, None]
    last = jnp.maximum(jnp.sum(is_kept, axis=-1) - 1, 0)
    return jnp.take_along_axis(ordered, last[:, None], axis=-1)
