"""The losses of BERT, and its families: masked tokens, classes of texts, and spans of answers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError
from shardlib.losses import Mean, cross_entropy
from shardlib.losses.aggregate import Aggregate, Output
from shardlib.registry import LABELED_TEXT, SPANS, TEXT, DataSpec, ModelFamily
from shardlib_models.bert import (
    ENCODING,
    BertClassifier,
    BertClassifierConfig,
    BertConfig,
    BertMaskedLM,
    BertSpans,
    BertSpansConfig,
    make_classifier,
    make_masked,
    make_spans,
    validate,
)


def masked_loss(
    model: BertMaskedLM,
    batch: dict[str, Any],
    rng: jax.Array,
    *,
    train: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss of the masked tokens, and metrics.

    Args:
        model: A BERT for this step alone: it is put into training or evaluation mode.
        batch: `tokens` [batch, length] int32; for packed or padded rows also `segment_ids` (0 for
            padding, which is never predicted) and `positions`. Targets are not used.
        rng: Chooses the tokens that are masked.
        train: Whether dropout is on.
        label_smoothing: See `shardlib.losses.cross_entropy`.
        z_loss: See `shardlib.losses.cross_entropy`.

    Returns:
        The loss, and the metrics `accuracy` and `nll_nats`.

    Raises:
        ModelError: If the id of the mask token is unknown, or the model has no head.
    """
    if model.head is None:
        raise ModelError(
            "a BERT without a head (model.head: none) has no loss to train by.\n"
            "  Set model.name to bert_classifier or bert_spans, which may start from its folder by "
            "model.init_from."
        )
    _switch(model, train)
    tokens, segment_ids = batch["tokens"], batch.get("segment_ids")
    shown, chosen = mask_tokens(tokens, rng, model.config)
    if segment_ids is not None:
        chosen &= segment_ids > 0
    logits = model(shown, positions=batch.get("positions"), segment_ids=segment_ids)
    return cross_entropy(logits, tokens, chosen, label_smoothing=label_smoothing, z_loss=z_loss)


def mask_tokens(
    tokens: jax.Array, rng: jax.Array, config: BertConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens [batch, length], some of them hidden, and a bool mask of what to predict.

    Raises:
        ModelError: If the id of the mask token is unknown.
    """
    if config.mask_token is None:
        raise ModelError(
            "a loss of masked tokens needs the id of the mask token, but model.mask_token is "
            'null.\n  Set it, or for a published model "mask_token_id" in its config.json.'
        )
    assert config.vocab_size is not None, "`make` fills it in"
    for_choice, for_kind, for_id = jax.random.split(rng, 3)
    chosen = jax.random.uniform(for_choice, tokens.shape) < config.mask_rate
    kind = jax.random.uniform(for_kind, tokens.shape)
    other = jax.random.randint(for_id, tokens.shape, 0, config.vocab_size, tokens.dtype)
    mask_token = jnp.asarray(config.mask_token, tokens.dtype)
    replaced = jnp.where(kind < 0.8, mask_token, jnp.where(kind < 0.9, other, tokens))
    return jnp.where(chosen, replaced, tokens), chosen


def classifier_loss(
    model: BertClassifier,
    batch: dict[str, Any],
    rng: jax.Array,
    *,
    train: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss over the labelled texts, and the metrics `accuracy` and `nll_nats`.

    Args:
        model: See `masked_loss`.
        batch: `tokens` [batch, length] int32, `labels` [batch] int32, where one below 0 keeps a
            text out of the loss, and if needed `segment_ids` (1, and 0 for padding) and `types`.
        rng: Not used: dropout draws from the model's own streams.
        train: Whether dropout is on.
        label_smoothing: See `shardlib.losses.cross_entropy`.
        z_loss: See `shardlib.losses.cross_entropy`.
    """
    del rng
    _switch(model, train)
    labels = batch["labels"]
    return cross_entropy(
        _called(model, batch), labels, labels >= 0, label_smoothing=label_smoothing, z_loss=z_loss
    )


def spans_loss(
    model: BertSpans, batch: dict[str, Any], rng: jax.Array, *, train: bool
) -> tuple[Mean, dict[str, Aggregate]]:
    """Returns the mean loss of the first and the last token of the answers, and the metrics
    `accuracy` and `nll_nats` over both; in an evaluation also the `logits` [batch, length, 2]
    float32 of each text, for the answers.

    Args:
        model: See `masked_loss`.
        batch: As in `classifier_loss`, with `starts` and `ends` [batch] int32 in place of `labels`:
            the first and the last token of the answer. Padding is never an answer.
        rng: Not used.
        train: Whether dropout is on.
    """
    del rng
    _switch(model, train)
    logits = _called(model, batch).astype(jnp.float32)
    segment_ids = batch.get("segment_ids")
    if segment_ids is not None:
        logits = jnp.where(segment_ids[:, :, None] > 0, logits, -1e9)
    places = jnp.stack([batch["starts"], batch["ends"]], axis=1)
    mean, metrics = cross_entropy(jnp.swapaxes(logits, 1, 2), places, places >= 0)
    return mean, {**metrics} if train else {**metrics, "logits": Output(logits)}


def _switch(model: Any, train: bool) -> None:
    if train:
        model.train()
    else:
        model.eval()


def _called(model: BertClassifier | BertSpans, batch: dict[str, Any]) -> jax.Array:
    optional = {name: batch.get(name) for name in ("types", "segment_ids")}
    return model(batch["tokens"], **optional)


def _reduced(data: DataSpec, config: BertConfig) -> DataSpec:
    """Returns the spec of a small example, which leaves an id for the mask token."""
    assert TEXT.reduced is not None
    small = TEXT.reduced(data, config)
    if config.mask_token is not None or config.vocab_size is None:
        return small
    return dataclasses.replace(small, vocab_size=config.vocab_size - 1)


MASKED = ModelFamily(
    config=BertConfig,
    inputs=dataclasses.replace(TEXT, reduced=_reduced),
    make=make_masked,
    validate=validate,
    loss=masked_loss,
    encoding=ENCODING,
    architectures={
        "BertForMaskedLM": "shardlib_models.hf.bert:BERT_MASKED",
        "RobertaForMaskedLM": "shardlib_models.hf.bert:ROBERTA_MASKED",
        "BertModel": "shardlib_models.hf.bert:BERT_HEADLESS",
        "RobertaModel": "shardlib_models.hf.bert:ROBERTA_HEADLESS",
        "XLMRobertaModel": "shardlib_models.hf.bert:XLM_ROBERTA_HEADLESS",
    },
)

CLASSIFIER = ModelFamily(
    config=BertClassifierConfig,
    inputs=LABELED_TEXT,
    make=make_classifier,
    validate=validate,
    loss=classifier_loss,
    encoding=ENCODING,
    architectures={
        "BertForSequenceClassification": "shardlib_models.hf.bert:BERT_CLASSIFIER",
        "RobertaForSequenceClassification": "shardlib_models.hf.bert:ROBERTA_CLASSIFIER",
    },
)

SPAN_FINDER = ModelFamily(
    config=BertSpansConfig,
    inputs=SPANS,
    make=make_spans,
    validate=validate,
    loss=spans_loss,
    encoding=ENCODING,
    architectures={
        "BertForQuestionAnswering": "shardlib_models.hf.bert:BERT_SPANS",
        "RobertaForQuestionAnswering": "shardlib_models.hf.bert:ROBERTA_SPANS",
    },
)
