"""Granite: Llama with factors of embeddings, scores, branches and logits."""

import dataclasses

from shardlib.hf import Field
from shardlib_models.hf.decoder_fields import without
from shardlib_models.hf.llama import LLAMA

_FACTORS = {
    "embedding_multiplier": Field("embed_scale", 1.0, resolved="embed_factor"),
    "attention_multiplier": Field("query_scale", 1.0, resolved="score_scale"),
    "residual_multiplier": Field("residual_scale", 1.0),
    "logits_scaling": Field("logit_divisor", 1.0),
}

GRANITE = dataclasses.replace(
    LLAMA,
    name="GraniteForCausalLM",
    model_type="granite",
    fields={**LLAMA.fields, **_FACTORS},
    ours=without(LLAMA.ours, *(field.ours for field in _FACTORS.values())),
)
