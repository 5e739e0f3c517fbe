"""BERT and RoBERTa with their heads for masked tokens, classes of texts and spans of answers, or
with none."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.hf import Architecture, Converter, Field, TensorRow, rows
from shardlib_models.bert import BertFields
from shardlib_models.hf.encoder_fields import CLASSES, SIZES, layers

_LAYERS = {
    "projections": "attention.self.query attention.self.key attention.self.value "
    "attention.output.dense",
    "mlp": "intermediate.dense output.dense",
    "norms": "attention.output.LayerNorm output.LayerNorm",
}


def _encoder(prefix: str) -> tuple[TensorRow, ...]:
    """Returns the rows of an encoder whose tensors begin with a prefix."""
    start = f"{prefix}embeddings"
    return rows(f"""
encoder/token_embedding/embedding  {start}.word_embeddings.weight  vocab embed
encoder/position_embedding/embedding  {start}.position_embeddings.weight  positions embed
encoder/type_embedding/embedding  {start}.token_type_embeddings.weight  types embed
encoder/norm/scale|bias  {start}.LayerNorm.weight|bias  (norm)
{layers("encoder/layers", f"{prefix}encoder.layer.{{layers}}", **_LAYERS)}
""")


def _masked(transform: str, norm: str, bias: str) -> tuple[TensorRow, ...]:
    return rows(f"""
head/transform/kernel|bias  {transform}.weight|bias  (features) embed
head/norm/scale|bias  {norm}.weight|bias  (norm)
head/bias  {bias}  vocab
""")


def _classifier(pooler: str, head: str) -> tuple[TensorRow, ...]:
    return rows(f"""
pooler/kernel|bias  {pooler}.weight|bias  (features) embed
head/kernel|bias  {head}.weight|bias  (classes) features
""")


_SPANS = rows("""
head/kernel|bias  qa_outputs.weight|bias  (classes) embed
""")
_BERT_ROWS = _encoder("bert.")
_ROBERTA_ROWS = _encoder("roberta.")


def _read_positions(theirs: Mapping[str, Any]) -> dict[str, Any]:
    offset = theirs.get("pad_token_id", 1) + 1
    return {"position_offset": offset, "max_positions": theirs["max_position_embeddings"] - offset}


def _write_positions(config: BertFields) -> dict[str, Any]:
    offset = config.position_offset
    return {"pad_token_id": offset - 1, "max_position_embeddings": config.max_positions + offset}


_FIELDS = {
    **SIZES,
    "vocab_size": Field("vocab_size"),
    "type_vocab_size": Field("num_types", 2),
    "hidden_dropout_prob": Field("dropout", 0.1),
}
_FIXED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
# The token that hides others is known to the tokenizer alone.
_MASKED_FIELDS = {"mask_token_id": Field("mask_token", None)}
# The head for masked tokens of RoBERTa has this nonlinearity, whatever that of the layers.
_GELU = Field("activation", "gelu", {"gelu": "gelu"})
_OLD_NORMS = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

BERT_SPANS = Architecture(
    name="BertForQuestionAnswering",
    model_type="bert",
    fields={**_FIELDS, "max_position_embeddings": Field("max_positions")},
    fixed=_FIXED,
    ours={"position_offset": 0},
    table=lambda config: _BERT_ROWS + _SPANS,
    prefix="bert.",
    ignored=("*.embeddings.position_ids",),
    older=_OLD_NORMS,
)

BERT_CLASSIFIER = dataclasses.replace(
    BERT_SPANS,
    name="BertForSequenceClassification",
    converters=(CLASSES,),
    table=lambda config: _BERT_ROWS + _classifier("bert.pooler.dense", "classifier"),
)

BERT_MASKED = dataclasses.replace(
    BERT_SPANS,
    name="BertForMaskedLM",
    ours={**BERT_SPANS.ours, "head": "masked"},
    fields={**BERT_SPANS.fields, **_MASKED_FIELDS},
    fixed={**_FIXED, "tie_word_embeddings": True},
    table=lambda config: (
        _BERT_ROWS
        + _masked(
            "cls.predictions.transform.dense",
            "cls.predictions.transform.LayerNorm",
            "cls.predictions.bias",
        )
    ),
    tied={
        "bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight",
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    },
    # The second head of the published checkpoints, which told whether a sentence follows another.
    ignored=(*BERT_SPANS.ignored, "bert.pooler.*", "cls.seq_relationship.*"),
)

ROBERTA_SPANS = dataclasses.replace(
    BERT_SPANS,
    name="RobertaForQuestionAnswering",
    model_type="roberta",
    fields=_FIELDS,
    converters=(Converter(_read_positions, _write_positions),),
    ours={},
    table=lambda config: _ROBERTA_ROWS + _SPANS,
    prefix="roberta.",
    older={},
)

ROBERTA_CLASSIFIER = dataclasses.replace(
    ROBERTA_SPANS,
    name="RobertaForSequenceClassification",
    converters=(*ROBERTA_SPANS.converters, CLASSES),
    table=lambda config: _ROBERTA_ROWS + _classifier("classifier.dense", "classifier.out_proj"),
)

ROBERTA_MASKED = dataclasses.replace(
    ROBERTA_SPANS,
    name="RobertaForMaskedLM",
    ours={"head": "masked"},
    fields={
        **_FIELDS,
        **_MASKED_FIELDS,
        "hidden_act": _GELU,
    },
    fixed={**_FIXED, "tie_word_embeddings": True},
    table=lambda config: (
        _ROBERTA_ROWS + _masked("lm_head.dense", "lm_head.layer_norm", "lm_head.bias")
    ),
    tied={
        "roberta.embeddings.word_embeddings.weight": "lm_head.decoder.weight",
        "lm_head.bias": "lm_head.decoder.bias",
    },
    ignored=(*ROBERTA_SPANS.ignored, "roberta.pooler.*"),
)

# A pooler, which transformers trains with a head, is not part of the encoder.
BERT_HEADLESS = dataclasses.replace(
    BERT_SPANS,
    name="BertModel",
    ours={**BERT_SPANS.ours, "head": "none"},
    prefix="",
    table=lambda config: _encoder(""),
    ignored=("embeddings.position_ids", "pooler.*"),
)

ROBERTA_HEADLESS = dataclasses.replace(
    ROBERTA_SPANS,
    name="RobertaModel",
    ours={"head": "none"},
    prefix="",
    table=lambda config: _encoder(""),
    ignored=BERT_HEADLESS.ignored,
)

XLM_ROBERTA_HEADLESS = dataclasses.replace(
    ROBERTA_HEADLESS, name="XLMRobertaModel", model_type="xlm-roberta"
)
