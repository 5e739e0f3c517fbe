"""Text generation with a key-value cache."""

import contextlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.errors import ModelError
from shardlib.sharding.constrain import active, constrain, use
from shardlib_models.transformer_attention import Context, KeyValues

if TYPE_CHECKING:
    from shardlib_models.transformer import Transformer


def generate(
    model: "Transformer",
    tokens: jax.Array,
    *,
    length: int,
    temperature: float | jax.Array = 1.0,
    rng: jax.Array,
) -> jax.Array:
    """Returns `tokens` continued: [batch, prompt + length] int32. Pure, and traceable by `jax.jit`.

    The prompt is read once. Each further step feeds one token and reads the keys and values of all
    earlier tokens from a cache.

    Args:
        model: The transformer, which is not changed; dropout is off.
        tokens: [batch, prompt] int32, with at least one token in each row.
        length: Number of tokens to add.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and sampled.
        rng: A typed key; each position draws from its own.

    Raises:
        ModelError: If the prompt is empty, `length` is less than 1, or the total is longer than the
            model's positions.
    """
    prompt = tokens.shape[1]
    if prompt < 1 or length < 1:
        raise ModelError(
            f"cannot add {length} tokens to a prompt of {prompt}.\n"
            "  Start from 1 token or more, and add 1 or more."
        )
    model.check_length(prompt + length)
    model = nnx.merge(*nnx.split(model))
    model.eval()
    with whole_rows():
        temperature = jnp.asarray(temperature, jnp.float32)
        return _continued(model, tokens, length, temperature, rng)


def whole_rows() -> contextlib.AbstractContextManager[Any]:
    """Returns the active rules without a cut along length: decoding feeds one token at a time, and
    a prompt has any length."""
    scope = active()
    if scope is None:
        return contextlib.nullcontext()
    uncut = {"length": None, "residual_length": None}
    return use(scope.mesh, scope.rules.override(activations=uncut))


def _continued(
    model: "Transformer",
    prompts: jax.Array,
    length: int,
    temperature: jax.Array,
    rng: jax.Array,
) -> jax.Array:
    """Runs `generate` on a private copy of the model in evaluation mode."""
    batch, prompt = prompts.shape

    def step(tokens: jax.Array, start: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        at = Context(start=start, max_length=prompt + length)
        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1])[None], tokens.shape)
        x, _, caches = model.hidden(tokens, positions, at, caches)
        logits = model.logits(x[:, -1:])[:, 0]
        position = start + tokens.shape[1]
        drawn = sample(logits, temperature, jax.random.fold_in(rng, position))
        return drawn.astype(tokens.dtype), caches

    def add(state: tuple[jax.Array, Any], position: jax.Array) -> tuple[Any, jax.Array]:
        token, caches = state
        next_token, caches = step(token[:, None], position, caches)
        return (next_token, caches), next_token

    token, caches = step(prompts, jnp.int32(0), _empty(model, batch, prompt + length))
    steps = jnp.arange(prompt, prompt + length - 1, dtype=jnp.int32)
    _, rest = jax.lax.scan(add, (token, caches), steps)
    return jnp.concatenate([prompts, token[:, None], rest.T], axis=1)


def _empty(model: "Transformer", batch: int, max_length: int) -> tuple[KeyValues, ...]:
    """Returns zero caches of each stack: [layers, batch, max_length, kv_heads, head_dim]."""
    config, dtype = model.config, model.token_embedding.embedding[...].dtype

    def zeros(num_layers: int, size: int) -> jax.Array:
        shape = (num_layers, batch, max_length, config.kv_heads, size)
        return constrain(jnp.zeros(shape, dtype), None, "batch", None, "kv_heads", "head_dim")

    dense = config.num_dense_layers
    counts = [dense, config.num_layers - dense] if dense else [config.num_layers]
    return tuple(
        KeyValues(*(zeros(n, size) for size in (config.head_size, config.value_size)))
        for n in counts
    )


def sample(logits: jax.Array, temperature: jax.Array, key: jax.Array) -> jax.Array:
    """Returns one token for each row of `logits` [batch, vocab]."""
    logits = logits.astype(jnp.float32)
    greedy = temperature == 0
    drawn = jax.random.categorical(key, logits / jnp.where(greedy, 1.0, temperature))
    return jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn)
