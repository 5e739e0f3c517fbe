"""BERT and RoBERTa: encoders of text, for masked tokens, classes of texts, spans of answers, and
embeddings.

Source: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding"; Liu et al. 2019, "RoBERTa: A Robustly Optimized BERT Pretraining Approach".
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.config import configclass
from shardlib.errors import ModelError
from shardlib.registry import DataSpec, Encoding
from shardlib.sharding.constrain import constrain
from shardlib_models.data_sizes import faults_of_size
from shardlib_models.encoder import ACTIVATIONS, EncoderFields, encode, norm_of, stack
from shardlib_models.encoder import faults_of_fields as faults_of_encoder
from shardlib_models.layers import Embedding, Linear, dropout, parameter, whole


@configclass
class BertFields(EncoderFields):
    """The fields of BERT, whatever its head."""

    vocab_size: int | None = None
    """Number of rows of the embedding; null for the vocabulary of the data."""
    num_types: int = 2
    """Number of token types (segments), such as question and text."""
    max_positions: int = 512
    """Longest sequence, in tokens."""
    position_offset: int = 0
    """Unused rows at the start of the table of positions; 2 in RoBERTa."""
    init_from: str | None = None
    """A folder in the format of Hugging Face, or its name on the hub, whose weights the run starts
    from; its config.json gives the fields that are left out. A head that it does not have is
    initialised at random."""


@configclass
class BertConfig(BertFields):
    """BERT with a head that predicts masked tokens, or without a head.

    Of the tokens, `mask_rate` are predicted: 80% of them are replaced by the mask token, 10% by any
    token, and 10% stay. Source: Devlin et al. 2019, appendix A.1.
    """

    name: Literal["bert"] = "bert"
    head: Literal["masked", "none"] = "masked"
    """`none` for a model without a head, as models for embeddings are published; it cannot be
    trained."""
    mask_token: int | None = None
    """Id that hides a token; null for the first id beyond the vocabulary of the data."""
    mask_rate: float = 0.15
    """Probability that a token is predicted, in (0, 1]."""


@configclass
class BertClassifierConfig(BertFields):
    """BERT with a head that classifies texts by their first token."""

    name: Literal["bert_classifier"] = "bert_classifier"
    num_classes: int | None = None
    """Number of logits; null for the number of classes of the data."""


@configclass
class BertSpansConfig(BertFields):
    """BERT with a head that finds the first and the last token of an answer."""

    name: Literal["bert_spans"] = "bert_spans"


class BertEncoder(nnx.Module):
    """BERT from tokens to the last residual stream."""

    def __init__(self, config: BertFields, *, rngs: nnx.Rngs):
        self.config = config
        assert config.vocab_size is not None, "`make` fills it in"
        width, options = config.embed_dim, {"stddev": config.init_stddev, "rngs": rngs}
        rows = config.max_positions + config.position_offset
        self.token_embedding = Embedding(config.vocab_size, width, "vocab", **options)
        self.position_embedding = Embedding(rows, width, "positions", **options)
        self.type_embedding = Embedding(config.num_types, width, "types", **options)
        self.norm = norm_of(config)
        self.layers = stack(config, norms="post", rngs=rngs)
        self.embedding_dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        types: jax.Array | None,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array:
        """Returns the last residual stream [batch, length, embed]; see `BertMaskedLM`."""
        longest = self.config.max_positions
        if tokens.shape[1] > longest:
            raise ModelError(
                f"a sequence of {tokens.shape[1]} tokens is longer than max_positions={longest}.\n"
                "  Shorten it, or make the model with more positions."
            )
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        types = jnp.zeros_like(tokens) if types is None else types
        x = self.token_embedding(tokens) + self.type_embedding(types)
        x = x + self.position_embedding(positions + self.config.position_offset)
        return encode(self.layers, self.embedding_dropout(self.norm(x)), segment_ids, self.config)


class MaskedHead(nnx.Module):
    """The head for masked tokens: a layer, and the table of the embedding with a bias."""

    def __init__(self, config: BertFields, *, rngs: nnx.Rngs):
        assert config.vocab_size is not None, "`make` fills it in"
        self.activation = config.activation
        self.transform = _transform(config, rngs)
        self.norm = norm_of(config)
        self.bias = parameter(jnp.zeros(config.vocab_size), "vocab")

    def __call__(self, x: jax.Array, table: Embedding) -> jax.Array:
        x = constrain(self.transform(x), "batch", "length", "features")
        x = ACTIVATIONS[self.activation](x)
        logits = table.attend(self.norm(x)) + self.bias[...][None, None]
        return constrain(logits, "batch", "length", "vocab")


class BertMaskedLM(nnx.Module):
    """BERT from tokens to the logits of the token at each position, or to its output if it has no
    head."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = BertEncoder(config, rngs=rngs)
        self.head = MaskedHead(config, rngs=rngs) if config.head == "masked" else None

    def __call__(
        self,
        tokens: jax.Array,
        *,
        types: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits [batch, length, vocab], or without a head the last residual stream
        [batch, length, embed], in the dtype of the parameters.

        Args:
            tokens: [batch, length] int32.
            types: [batch, length] int32, the kind of each token; None for 0.
            positions: [batch, length] int32; None for 0, 1, 2, ...
            segment_ids: [batch, length] int32, 1 for text and 0 for padding, or the document of
                each position in a packed row. None: there is no padding.

        Raises:
            ModelError: If the row is longer than `max_positions`.
        """
        x = self.encoder(tokens, types, positions, segment_ids)
        return x if self.head is None else self.head(whole(x), self.encoder.token_embedding)


class BertClassifier(nnx.Module):
    """BERT from tokens to the logits of the classes of the text."""

    def __init__(self, config: BertClassifierConfig, *, rngs: nnx.Rngs):
        assert config.num_classes is not None, "`make` fills it in"
        self.config = config
        self.encoder = BertEncoder(config, rngs=rngs)
        self.pooler = _transform(config, rngs)
        inputs, outputs = {"features": config.embed_dim}, {"classes": config.num_classes}
        self.head = Linear(inputs, outputs, stddev=config.init_stddev, bias=True, rngs=rngs)
        self.head_dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        types: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits [batch, classes]; see `BertMaskedLM`."""
        x = self.encoder(tokens, types, positions, segment_ids)[:, 0]
        x = jnp.tanh(self.pooler(constrain(x, "batch", "embed")))
        return constrain(self.head(self.head_dropout(x)), "batch", "classes")


class BertSpans(nnx.Module):
    """BERT from tokens to the logits of the first and the last token of an answer."""

    def __init__(self, config: BertSpansConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = BertEncoder(config, rngs=rngs)
        inputs, outputs = {"embed": config.embed_dim}, {"classes": 2}
        self.head = Linear(inputs, outputs, stddev=config.init_stddev, bias=True, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        types: jax.Array | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the logits [batch, length, 2] of the first and the last token; see
        `BertMaskedLM`."""
        x = self.encoder(tokens, types, positions, segment_ids)
        return constrain(self.head(whole(x)), "batch", "length", "classes")


def _transform(config: BertFields, rngs: nnx.Rngs) -> Linear:
    # A second name for the width: a tensor cannot be cut twice by one rule.
    inputs, outputs = {"embed": config.embed_dim}, {"features": config.embed_dim}
    return Linear(inputs, outputs, stddev=config.init_stddev, bias=True, rngs=rngs)


def validate(config: Any, data: DataSpec) -> list[str]:
    """Returns all faults of a config of any head, alone and with its data, as sentences."""
    faults = faults_of_encoder(config)
    for name in ("vocab_size", "num_types", "max_positions", "num_classes"):
        value = getattr(config, name, None)
        if value is not None and value < 1:
            faults.append(f"{name} is {value}; it must be at least 1.")
    if config.position_offset < 0:
        faults.append(f"position_offset is {config.position_offset}; it must not be negative.")
    if data.sequence_length is not None and data.sequence_length > config.max_positions:
        faults.append(
            f"sequences of {data.sequence_length} tokens are longer than "
            f"max_positions={config.max_positions}; shorten them or raise it."
        )
    faults += faults_of_size(config, data, "vocab_size", "tokens")
    faults += faults_of_size(config, data, "num_types", "kinds of tokens")
    if isinstance(config, BertClassifierConfig):
        faults += faults_of_size(config, data, "num_classes", "classes")
    if isinstance(config, BertConfig):
        if not 0.0 < config.mask_rate <= 1.0:
            faults.append(f"mask_rate is {config.mask_rate}; it must be in (0, 1].")
        if config.mask_token is None and config.vocab_size == data.vocab_size is not None:
            faults.append(
                f"the data use all of vocab_size={config.vocab_size} ids, so none hides a token; "
                "raise it, leave it out, or set mask_token."
            )
        size = config.vocab_size or (data.vocab_size or 0) + 1
        if config.mask_token is not None and not 0 <= config.mask_token < size:
            faults.append(f"mask_token is {config.mask_token}; it must be in [0, {size}).")
    return faults


def _valid(config: Any, data: DataSpec) -> None:
    if faults := validate(config, data):
        raise ModelError("the BERT cannot be made:\n  " + "\n  ".join(faults))


def make_masked(config: BertConfig, data: DataSpec, rngs: nnx.Rngs) -> BertMaskedLM:
    """Returns a new BERT for masked tokens.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    _valid(config, data)
    size, token = config.vocab_size, config.mask_token
    if data.vocab_size is not None:
        size = data.vocab_size + (token is None) if size is None else size
        token = data.vocab_size if token is None and data.vocab_size < size else token
    return BertMaskedLM(dataclasses.replace(config, vocab_size=size, mask_token=token), rngs=rngs)


def make_classifier(config: BertClassifierConfig, data: DataSpec, rngs: nnx.Rngs) -> BertClassifier:
    """Returns a new BERT that classifies texts; see `make_masked`."""
    _valid(config, data)
    size, classes = config.vocab_size or data.vocab_size, config.num_classes or data.num_classes
    config = dataclasses.replace(config, vocab_size=size, num_classes=classes)
    return BertClassifier(config, rngs=rngs)


def make_spans(config: BertSpansConfig, data: DataSpec, rngs: nnx.Rngs) -> BertSpans:
    """Returns a new BERT that finds answers; see `make_masked`."""
    _valid(config, data)
    size = config.vocab_size or data.vocab_size
    return BertSpans(dataclasses.replace(config, vocab_size=size), rngs=rngs)


def hidden(model: Any, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Returns the last residual stream [batch, length, embed] of a BERT with any head or none."""
    return model.encoder(tokens, None, None, segment_ids)


ENCODING = Encoding(hidden=hidden, max_length=lambda config: config.max_positions)
