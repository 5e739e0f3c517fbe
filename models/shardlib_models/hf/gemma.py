"""Gemma, whose norms have scales that start at 0 and whose embeddings are scaled."""

import dataclasses

from shardlib.hf import Field
from shardlib_models.hf.decoder_fields import ACTIVATIONS
from shardlib_models.hf.llama import LLAMA

GEMMA = dataclasses.replace(
    LLAMA,
    name="GemmaForCausalLM",
    model_type="gemma",
    fields={
        **LLAMA.fields,
        "tie_word_embeddings": Field("tied_embeddings", True),
        # The first configs named the exact GELU in `hidden_act`, and were trained with the other.
        "hidden_act": Field("activation", "gelu_pytorch_tanh", ACTIVATIONS),
    },
    fixed={"attention_bias": False},
    ours={**LLAMA.ours, "norm_offset": 1.0, "embed_scale": True},
)
