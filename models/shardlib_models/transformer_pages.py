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


def pages(model: "Transformer", num_pages: int, page_size: int) -> tuple[Pages, ...]:
    """Returns zero pages of each stack of layers, in the dtype of the embeddings."""
    config, dtype = model.config, model.token_embedding.embedding[...].dtype
    dense = config.num_dense_layers
    counts = [dense, config.num_layers - dense] if dense else [config.num_layers]
    dims = config.head_size, config.value_size
    return tuple(empty_pages(n, num_pages, page_size, config.kv_heads, dims, dtype) for n in counts)


def step(
    model: "Transformer",
    tokens: jax.Array,
    rows: Rows,
    pages: tuple[Cache, ...],
    max_length: int,
) -> tuple[jax.Array, tuple[Cache, ...] | None]:
    """Returns the last residual stream [rows, embed] of `tokens` [rows] int32, and the pages."""
    # Rows without a sequence are padding: no expert gets them.
    real = (rows.pages > 0).astype(jnp.int32)[None]
    context = Context(rows=rows, max_length=max_length, segment_ids=real)
    x, _, written = model.hidden(tokens[None], rows.positions[None], context, pages)
    return x[0], written


def logits(model: "Transformer", hidden: jax.Array) -> jax.Array:
    """Returns the logits [n, vocab] of residual streams [n, embed]."""
    return model.logits(hidden[None])[0]


def max_length(config: TransformerConfig) -> int | None:
    """Returns the positions that a model has."""
    return config.max_positions


DECODING = Decoding(pages=pages, step=step, logits=logits, max_length=max_length)
