"""Gemma, whose norms have scales that start at 0 and whose embeddings are scaled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.errors import ModelError
from shardlib.hf import Converter, Field
from shardlib_models.hf.decoder_fields import without
from shardlib_models.hf.llama import LLAMA
from shardlib_models.transformer_config import TransformerConfig

# The first checkpoints name the exact GELU, and were trained with the other.
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh", "silu": "silu"}


def _read_activation(theirs: Mapping[str, Any]) -> dict[str, Any]:
    name = theirs.get("hidden_act", "gelu_pytorch_tanh")
    if name not in _ACTIVATIONS:
        raise ValueError(f"hidden_act is {name!r}; supported: {', '.join(_ACTIVATIONS)}.")
    return {"activation": _ACTIVATIONS[name]}


def _write_activation(config: TransformerConfig) -> dict[str, Any]:
    names = [name for name, ours in _ACTIVATIONS.items() if ours == config.activation]
    if not names:
        raise ModelError(f"activation is {config.activation!r}, which Gemma does not have.")
    return {"hidden_act": names[0]}


GEMMA = dataclasses.replace(
    LLAMA,
    name="GemmaForCausalLM",
    model_type="gemma",
    fields={
        **without(LLAMA.fields, "hidden_act"),
        "tie_word_embeddings": Field("tied_embeddings", True),
    },
    converters=(*LLAMA.converters, Converter(_read_activation, _write_activation)),
    fixed={"attention_bias": False},
    ours={**LLAMA.ours, "norm_offset": 1.0, "embed_scale": True},
)
