"""Text generation by T5: the encoder runs once, and the decoder has a key-value cache."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.errors import ModelError
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import whole
from shardlib_models.t5_layers import Memory
from shardlib_models.transformer_attention import KeyValues
from shardlib_models.transformer_decode import sample, whole_rows

if TYPE_CHECKING:
    from shardlib_models.t5 import T5


def generate(
    model: "T5",
    tokens: jax.Array,
    *,
    length: int,
    temperature: float | jax.Array = 1.0,
    rng: jax.Array,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Returns `tokens` and then the answers to them: [batch, prompt + length] int32. Pure, and
    traceable by `jax.jit`.

    The input is encoded once, and its keys and values are computed once for each layer. Each step
    feeds one token and reads the keys and values of all earlier tokens from a cache. An answer ends
    where the model writes its end-of-text token; what follows it has no meaning.

    Args:
        model: The T5, which is not changed; dropout is off.
        tokens: [batch, prompt] int32, the inputs, with at least one token in each row.
        length: Number of tokens of each answer.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and sampled.
        rng: A typed key; each position draws from its own.
        segment_ids: [batch, prompt] int32, 1 for text and 0 for padding; None for no padding.

    Raises:
        ModelError: If the inputs are empty, or `length` is less than 1.
    """
    if tokens.shape[1] < 1 or length < 1:
        raise ModelError(
            f"cannot answer {tokens.shape[1]} tokens with {length}.\n"
            "  Give inputs of 1 token or more, and ask for 1 or more."
        )
    model = nnx.merge(*nnx.split(model))
    model.eval()
    with whole_rows():
        answers = _answers(
            model, tokens, segment_ids, length, jnp.asarray(temperature, jnp.float32), rng
        )
    return jnp.concatenate([tokens, answers], axis=1)


def _answers(
    model: "T5",
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    length: int,
    temperature: jax.Array,
    rng: jax.Array,
) -> jax.Array:
    """Returns the answers [batch, length] of a private copy of the model in evaluation mode."""
    batch = tokens.shape[0]
    encoded = model.encoder(model.token_embedding(tokens), segment_ids)
    cross = model.decoder.cross_keys(whole(encoded))
    ones = None if segment_ids is None else jnp.ones((batch, 1), segment_ids.dtype)

    def add(state: tuple[jax.Array, KeyValues], position: jax.Array) -> tuple[tuple, jax.Array]:
        token, cache = state
        bias = model.decoder.bias(position, 1, length)
        memory = Memory(None, bias, None, (ones, segment_ids), position)
        x, cache = model.decoder(model.token_embedding(token[:, None]), memory, cross, cache)
        key = jax.random.fold_in(rng, position)
        token = sample(model.logits(x)[:, 0], temperature, key).astype(tokens.dtype)
        assert cache is not None
        return (token, cache), token

    start = jnp.full(batch, model.config.start_token, tokens.dtype)
    steps = jnp.arange(length, dtype=jnp.int32)
    _, answers = jax.lax.scan(add, (start, _empty(model, batch, length)), steps)
    return answers.T


def _empty(model: "T5", batch: int, length: int) -> KeyValues:
    """Returns a zero cache of the decoder: [layers, batch, length, kv_heads, head_dim]."""
    config, dtype = model.config, model.token_embedding.embedding[...].dtype
    shape = (config.decoder_size, batch, length, config.num_heads, config.head_size)
    axes = (None, "batch", None, "kv_heads", "head_dim")
    key, value = (constrain(jnp.zeros(shape, dtype), *axes) for _ in range(2))
    return KeyValues(key, value)
