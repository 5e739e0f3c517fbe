"""Decoding with keys and values in pages, for the engine."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from shardlib.nn.attention import Pages, Rows, empty_pages
from shardlib.registry import Decoding
from shardlib_models.transformer_attention import Cache, Context
from shardlib_models.transformer_config import TransformerConfig

if TYPE_CHECKING:
    from shardlib_models.transformer import Transformer


def pages(
    model: "Transformer",
    num_groups: int,
    num_pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Pages, ...]:
    """Returns zero pages of each stack of layers, in the dtype of the embeddings or another."""
    config = model.config
    dtype = model.token_embedding.embedding[...].dtype if dtype is None else dtype
    dense = config.num_dense_layers
    counts = [dense, config.num_layers - dense] if dense else [config.num_layers]
    sizes = num_groups, num_pages, page_size, (config.num_heads, config.kv_heads)
    dims = config.head_size, config.value_size
    return tuple(empty_pages(n, *sizes, dims, dtype, is_plain=not config.sinks) for n in counts)


def step(
    model: "Transformer",
    tokens: jax.Array,
    rows: Rows,
    pages: tuple[Cache, ...],
    max_length: int,
) -> tuple[jax.Array, tuple[Cache, ...] | None]:
    """Returns the last residual stream [groups, rows, embed] of `tokens` [groups, rows] int32, and
    the pages."""
    # Rows without a sequence are padding: no expert gets them.
    real = (jnp.asarray(rows.pages) > 0).astype(jnp.int32)
    context = Context(rows=rows, max_length=max_length, segment_ids=real)
    x, _, written = model.hidden(tokens, jnp.asarray(rows.positions), context, pages)
    return x, written


def logits(model: "Transformer", hidden: jax.Array) -> jax.Array:
    """Returns the logits [groups, n, vocab] of residual streams [groups, n, embed]."""
    return model.logits(hidden)


def embedding(model: "Transformer", hidden: jax.Array) -> jax.Array:
    """Returns the input of the head [groups, n, features] for residual streams."""
    return model.normed(hidden)


def max_length(config: TransformerConfig) -> int | None:
    """Returns the positions that a model has."""
    return config.max_positions


DECODING = Decoding(
    pages=pages, step=step, logits=logits, embedding=embedding, max_length=max_length
)
