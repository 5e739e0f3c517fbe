"""T5: an encoder and a decoder of text, for pairs of inputs and targets.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.errors import ModelError
from shardlib.losses import Mean, cross_entropy
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.registry import PAIRS, DataSpec, ModelFamily
from shardlib_models.layers import Embedding, Linear, dropout, read_by_head, residual, whole
from shardlib_models.sizes import T5_SIZES
from shardlib_models.t5_config import TAGS, T5Config, validate
from shardlib_models.t5_decode import generate
from shardlib_models.t5_layers import DecoderLayer, EncoderLayer, Memory, RelativeBias, norm_of
from shardlib_models.t5_pages import DECODING, ENCODING
from shardlib_models.transformer import project
from shardlib_models.transformer_attention import KeyValues

Cross = tuple[jax.Array, jax.Array]


class Encoder(nnx.Module):
    """The encoder, from embeddings to its output."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.bias = RelativeBias(config, bidirectional=True, rngs=rngs)
        count = config.num_layers
        # Every stage of a pipeline runs the whole encoder; they divide the layers of the decoder.
        self.layers = stack_layers(
            lambda rngs: EncoderLayer(config, rngs=rngs), count, rngs, axis_name="encoder_layers"
        )
        self.norm = norm_of(config)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns the output [batch, length, embed] for embeddings of that shape."""
        bias = self.bias(0, x.shape[1], x.shape[1])

        def call(layer: EncoderLayer, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return layer(x, bias, segment_ids), None

        options: dict[str, Any] = {"remat": self.config.remat, "tags": TAGS, "staged": False}
        x, _ = scan_layers(call, self.layers, residual(self.dropout(x)), **options)
        return self.dropout(self.norm(x))


class Decoder(nnx.Module):
    """The decoder, from embeddings and the output of the encoder to the input of the head."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        self.bias = RelativeBias(config, bidirectional=False, rngs=rngs)
        count = config.decoder_size
        self.layers = stack_layers(lambda rngs: DecoderLayer(config, rngs=rngs), count, rngs)
        self.norm = norm_of(config)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        x: jax.Array,
        memory: Memory,
        cross: Cross | None = None,
        cache: KeyValues | None = None,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns the input of the head [batch, length, embed], and the cache with the new rows.

        Args:
            x: Embeddings of that shape.
            memory: What all layers know.
            cross: Keys and values of the encoder's output by layer, as `cross_keys` returns them.
            cache: Keys and values of earlier positions.
        """

        def call(layer: DecoderLayer, carry: Any, inputs: Any) -> tuple[Any, None]:
            x, cache = carry
            cross, index = inputs
            return layer(x, memory, cross, cache, 0 if index is None else index), None

        index = None if cache is None else jnp.arange(self.config.decoder_size, dtype=jnp.int32)
        carry, inputs = (residual(self.dropout(x)), cache), (cross, index)
        remat = self.config.remat
        (x, cache), _ = scan_layers(call, self.layers, carry, inputs, remat=remat, tags=TAGS)
        return self.dropout(self.norm(x)), cache

    def cross_keys(self, encoded: jax.Array) -> Cross:
        """Returns keys and values [layers, batch, length, heads, head_dim] of an encoder's
        output."""

        def call(layer: DecoderLayer, _: None, inputs: None) -> tuple[None, Cross]:
            return None, layer.cross.keys(encoded)

        return scan_layers(call, self.layers, None, staged=False)[1]


class T5(nnx.Module):
    """T5 from the tokens of an input and of the answer so far to the logits of the next token."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.config = config
        assert config.vocab_size is not None, "`make` fills it in"
        width, factor = config.embed_dim, config.init_factor
        table = {"stddev": factor, "rngs": rngs}
        self.token_embedding = Embedding(config.vocab_size, width, "vocab", **table)
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        options = {"stddev": factor * width**-0.5, "rngs": rngs}
        outputs = {"vocab": config.vocab_size}
        self.head = None if config.tied_embeddings else Linear({"embed": width}, outputs, **options)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        decoder_tokens: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        decoder_segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits [batch, decoder_length, vocab], in the dtype of the parameters.

        Args:
            tokens: [batch, length] int32, the input.
            decoder_tokens: [batch, decoder_length] int32: `start_token`, then the answer so far.
            segment_ids: [batch, length] int32, 1 for text and 0 for padding, or the pair of each
                position in a packed row. None: there is no padding.
            decoder_segment_ids: The same of `decoder_tokens`.

        Raises:
            ModelError: If there are no `decoder_tokens`.
        """
        if decoder_tokens is None:
            raise ModelError(
                "T5 has no decoder_tokens, which its logits belong to.\n"
                "  Give decoder_tokens [batch, length]: the start token, then the answer so far."
            )
        encoded = self.encoder(self.token_embedding(tokens), segment_ids)
        length = decoder_tokens.shape[1]
        ids = (decoder_segment_ids, segment_ids)
        memory = Memory(
            whole(encoded),
            self.decoder.bias(0, length, length),
            decoder_segment_ids,
            both_ids(ids, (decoder_tokens, tokens)),
        )
        x, _ = self.decoder(self.token_embedding(decoder_tokens), memory)
        return self.logits(x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits [batch, length, vocab] of the output of the decoder."""
        if self.head is not None:
            return project(self.head, read_by_head(x))
        x = x * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        return project(self.token_embedding, read_by_head(x))


def both_ids(
    ids: tuple[jax.Array | None, jax.Array | None], tokens: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the documents of queries and keys: of none or of both, 1 where unknown."""
    query_ids, key_ids = ids
    if query_ids is None and key_ids is None:
        return ids
    query_ids = jnp.ones_like(tokens[0]) if query_ids is None else query_ids
    return query_ids, jnp.ones_like(tokens[1]) if key_ids is None else key_ids


def make(config: T5Config, data: DataSpec, rngs: nnx.Rngs) -> T5:
    """Returns a new T5 for `data`.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    if faults := validate(config, data):
        raise ModelError("the T5 cannot be made:\n  " + "\n  ".join(faults))
    size = config.vocab_size or data.vocab_size
    return T5(dataclasses.replace(config, vocab_size=size), rngs=rngs)


def loss(
    model: T5,
    batch: dict[str, Any],
    rng: jax.Array,
    *,
    train: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss of the targets, and the metrics `accuracy` and `nll_nats`.

    Args:
        model: A T5 for this step alone: it is put into training or evaluation mode.
        batch: As `shardlib.registry.PAIRS` says. Padding is not predicted.
        rng: Not used: dropout draws from the model's own streams.
        train: Whether dropout is on.
        label_smoothing: See `shardlib.losses.cross_entropy`.
        z_loss: See `shardlib.losses.cross_entropy`.
    """
    del rng
    if train:
        model.train()
    else:
        model.eval()
    targets, target_ids = batch["targets"], batch["target_segment_ids"]
    logits = model(
        batch["tokens"],
        decoder_tokens=shifted(targets, target_ids, model.config.start_token),
        segment_ids=batch["segment_ids"],
        decoder_segment_ids=target_ids,
    )
    return cross_entropy(
        logits, targets, target_ids > 0, label_smoothing=label_smoothing, z_loss=z_loss
    )


def shifted(targets: jax.Array, segment_ids: jax.Array, start_token: int) -> jax.Array:
    """Returns what a decoder reads before each of its targets [batch, length] int32: the target
    before it, and the start token before the first of each segment."""
    ids, before = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (segment_ids, targets))
    return jnp.where(segment_ids == ids, before, jnp.asarray(start_token, targets.dtype))


FAMILY = ModelFamily(
    config=T5Config,
    inputs=PAIRS,
    make=make,
    validate=validate,
    loss=loss,
    generate=generate,
    decoding=DECODING,
    encoding=ENCODING,
    sizes=T5_SIZES,
    architectures={"T5ForConditionalGeneration": "shardlib_models.hf.t5:T5"},
)
