"""Gemma 1, 2 and 3, whose norms have scales that start at 0 and whose embeddings are scaled."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.errors import ModelError
from shardlib.hf import Converter, Field, rows
from shardlib_models.hf.decoder_fields import read_scaling, rope, windows, without, write_scaling
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
    fixed={"attention_bias": False, "use_bidirectional_attention": None},
    ours={**LLAMA.ours, "norm_offset": 1.0, "embed_scale": "sqrt"},
)


def _write_query_scale(config: TransformerConfig) -> dict[str, Any]:
    scale = config.score_scale
    number = round(scale**-2)
    if abs(number**-0.5 - scale) > 1e-9 * scale:
        raise ModelError(f"query_scale is {scale!r}, not 1 / sqrt(n) of an integer n.")
    return {"query_pre_attn_scalar": number}


_QUERY_SCALE = Converter(
    lambda theirs: {"query_scale": theirs.get("query_pre_attn_scalar", 256) ** -0.5},
    _write_query_scale,
)
_LAYER = "model.layers.{layers}"
_SANDWICH = rows(f"""
layers/attention_out_norm/scale  {_LAYER}.post_attention_layernorm.weight  norm
layers/mlp_norm/scale  {_LAYER}.pre_feedforward_layernorm.weight  norm
layers/mlp_out_norm/scale  {_LAYER}.post_feedforward_layernorm.weight  norm
""")

GEMMA2 = dataclasses.replace(
    GEMMA,
    name="Gemma2ForCausalLM",
    model_type="gemma2",
    fields={
        **without(GEMMA.fields, "head_dim"),
        "head_dim": Field("head_dim", 256, resolved="head_size"),
        "hidden_activation": Field(
            "activation", "gelu_pytorch_tanh", {"gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
        ),
        "attn_logit_softcapping": Field("attention_softcap", 50.0),
        "final_logit_softcapping": Field("logit_softcap", 30.0),
    },
    fixed={"attention_bias": False, "use_bidirectional_attention": None},
    ours={
        **without(
            GEMMA.ours,
            "query_scale",
            "attention_softcap",
            "logit_softcap",
            "window",
            "global_every",
        ),
        "block": "sandwich",
    },
    converters=(rope(), _QUERY_SCALE, windows(2)),
    table=lambda config: LLAMA.table(config) + _SANDWICH,
)


def _read_ropes(theirs: Mapping[str, Any]) -> dict[str, Any]:
    ropes = theirs.get("rope_parameters") or {}
    if not isinstance(ropes, Mapping):
        raise ValueError(f"rope_parameters is {ropes!r}; supported: null or an object.")
    full = {**(ropes.get("full_attention") or {}), **(theirs.get("rope_scaling") or {})}
    local = ropes.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ValueError("rope_type of sliding_attention is not 'default', the one supported.")
    local_theta = local.get("rope_theta", theirs.get("rope_local_base_freq", 1e4))
    theta = full.get("rope_theta", theirs.get("rope_theta", 1e6))
    held = windows(6).read(theirs)
    if held["window"] is not None and held["global_every"] is None:  # No layer sees all positions.
        return {"rope_theta": local_theta, "rope_scaling": None, "local_rope_theta": None}
    local_theta = None if held["global_every"] is None else local_theta
    scaling = read_scaling(theirs, full)
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local_theta}


def _write_ropes(config: TransformerConfig) -> dict[str, Any]:
    if any(config.is_local) and config.local_rope_theta is None and config.rope_scaling is not None:
        raise ModelError("rope_scaling applies to layers with a window, which Gemma 3 lacks.")
    return {
        "rope_theta": config.rope_theta,
        "rope_local_base_freq": config.local_rope_theta or config.rope_theta,
        "rope_scaling": write_scaling(config),
    }


GEMMA3 = dataclasses.replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    fields={
        **without(GEMMA2.fields, "attn_logit_softcapping"),
        "final_logit_softcapping": Field("logit_softcap", None),
    },
    fixed={**GEMMA2.fixed, "attn_logit_softcapping": None},
    ours={
        **without(GEMMA2.ours, "local_rope_theta"),
        "qk_norm": True,
        "attention_softcap": None,
    },
    converters=(Converter(_read_ropes, _write_ropes), _QUERY_SCALE, windows(6)),
)
