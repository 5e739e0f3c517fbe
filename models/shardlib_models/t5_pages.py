"""Decoding of T5 with keys and values in pages, for the engine.

The first positions of a sequence hold keys and values of the encoder's output, and the others those
of the answer: both have the same heads.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from shardlib.nn.attention import Pages, Rows, attend_pages, empty_pages
from shardlib.nn.attention.mask import Mask
from shardlib.nn.stack import scan_layers
from shardlib.registry import Decoding, Encoding
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import whole
from shardlib_models.t5_layers import Attention, DecoderLayer, added

if TYPE_CHECKING:
    from shardlib_models.t5 import T5

_MASK = Mask(scale=1.0)


def pages(
    model: "T5",
    num_groups: int,
    num_pages: int,
    page_size: int,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[Pages, ...]:
    """Returns zero pages of the decoder, in the dtype of the embeddings or another."""
    config = model.config
    dtype = model.token_embedding.embedding[...].dtype if dtype is None else dtype
    heads, dims = config.num_heads, (config.head_size, config.head_size)
    sizes = config.decoder_size, num_groups, num_pages, page_size, (heads, heads)
    return (empty_pages(*sizes, dims, dtype, is_plain=False),)


def step(
    model: "T5", tokens: jax.Array, rows: Rows, pages: tuple[Pages, ...], max_length: int
) -> tuple[jax.Array, tuple[Pages, ...]]:
    """Returns the last residual stream of the decoder [groups, rows, embed] for `tokens` [groups,
    rows] int32, and the pages."""
    del max_length
    bias = _bias_by_distance(model)

    def call(layer: DecoderLayer, carry: Any, index: jax.Array) -> tuple[Any, None]:
        x, pages = carry
        return _called(layer, x, pages, index, rows, bias), None

    index = jnp.arange(model.config.decoder_size, dtype=jnp.int32)
    carry: tuple[jax.Array, Any] = (model.token_embedding(tokens), pages[0])
    (x, written), _ = scan_layers(call, model.decoder.layers, carry, index)
    return x, (written,)


def _bias_by_distance(model: "T5") -> jax.Array:
    """Returns the bias of self-attention [heads, distances], of a query to keys before it; the last
    one counts for all longer distances."""
    longest = model.config.relative_max_distance
    return model.decoder.bias(longest, 1, longest + 1)[:, 0, ::-1]


def _called(
    layer: DecoderLayer, x: jax.Array, pages: Pages, index: jax.Array, rows: Rows, bias: jax.Array
) -> tuple[jax.Array, Pages]:
    """Returns the residual stream after a layer, and the pages with the keys of its rows."""

    def query(attention: Attention, y: jax.Array) -> jax.Array:
        return constrain(attention.query(y), "batch", "length", "heads", "head_dim")

    y = whole(layer.attention_norm(x))
    key, value = layer.attention.keys(y)
    y, pages = attend_pages(
        query(layer.attention, y), key, value, pages, index, rows, _MASK, bias=bias
    )
    x = added(x, layer.attention.out(y), "attention_out", layer.branch_dropout)
    y = query(layer.cross, whole(layer.cross_norm(x)))
    y, pages = attend_pages(y, None, None, pages, index, rows, _MASK)
    x = added(x, layer.cross.out(y), "cross_out", layer.branch_dropout)
    return added(x, layer.mlp(whole(layer.mlp_norm(x))), "mlp_out", layer.branch_dropout), pages


def normed(model: "T5", hidden: jax.Array) -> jax.Array:
    """Returns the input of the head [groups, n, embed] for residual streams."""
    return model.decoder.norm(hidden)


def encoded(model: "T5", tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Returns the output of the encoder [batch, length, embed]."""
    return model.encoder(model.token_embedding(tokens), segment_ids)


def keys_of_text(model: "T5", hidden: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """Returns keys and values [layers, batch, length, heads, head_dim] of an encoder's output."""
    return (model.decoder.cross_keys(whole(hidden)),)


def _any_length(config: Any) -> None:
    """Returns None: distances have a bias, and positions have none."""
    del config


DECODING = Decoding(
    pages=pages,
    step=step,
    logits=lambda model, hidden: model.logits(normed(model, hidden)),
    embedding=normed,
    max_length=_any_length,
    keys_of_text=keys_of_text,
    start_token=lambda config: config.start_token,
)
ENCODING = Encoding(hidden=encoded, max_length=_any_length)
