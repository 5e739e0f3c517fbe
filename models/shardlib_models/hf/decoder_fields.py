"""Fields that the tables of decoders share."""

from collections.abc import Mapping
from typing import Any

from shardlib.hf import Converter, Field
from shardlib_models.transformer_config import TransformerConfig


def without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the fields without some of them."""
    return {name: value for name, value in fields.items() if name not in names}


ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
"""Names of nonlinearities by ours."""

PLAIN = {
    "block": "pre",
    "norm": "rms",
    "norm_offset": 0.0,
    "qk_norm": False,
    "positions": "rotary",
    "position_offset": 0,
    "rotary_dims": None,
    "rotary_interleaved": False,
    "mlp": "gated",
    "token_dim": None,
    "embed_scale": False,
    "query_scale": None,
    "logit_softcap": None,
    "head_bias": False,
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
}
"""Our fields as Llama has them."""

LAYER_NORM = {
    **PLAIN,
    "norm": "layer",
    "mlp": "plain",
    "qkv_bias": True,
    "out_bias": True,
    "mlp_bias": True,
    "window": None,
    "moe": None,
}
"""Our fields as in decoders of the time of GPT-2."""

SIZES = {
    "num_hidden_layers": Field("num_layers"),
    "hidden_size": Field("embed_dim"),
    "intermediate_size": Field("mlp_dim", resolved="mlp_size"),
    "num_attention_heads": Field("num_heads"),
    "num_key_value_heads": Field("num_kv_heads", None, resolved="kv_heads"),
    "head_dim": Field("head_dim", None, resolved="head_size"),
    "vocab_size": Field("vocab_size"),
    "max_position_embeddings": Field("max_positions", None),
    "rms_norm_eps": Field("norm_eps"),
    "tie_word_embeddings": Field("tied_embeddings", False),
}
"""The fields of decoders with rotary positions and RMSNorm."""


def rope(default_theta: float = 10_000.0) -> Converter:
    """Returns the converter of the fields of rotary positions.

    Args:
        default_theta: The base where config.json names none.
    """
    return Converter(lambda theirs: _read_rope(theirs, default_theta), _write_rope)


def _read_rope(theirs: Mapping[str, Any], default_theta: float) -> dict[str, Any]:
    # transformers 5 joins `rope_theta` and `rope_scaling` of version 4 in `rope_parameters`.
    fields = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    theta = fields.get("rope_theta", theirs.get("rope_theta", default_theta))
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}; supported: 'default', 'llama3'.")
    scaling = {ours: fields[name] for name, ours in _LLAMA3.items()}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _write_rope(config: TransformerConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    fields = {name: getattr(scaling, ours) for name, ours in _LLAMA3.items()}
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": {"rope_type": "llama3", **fields},
    }


_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_positions",
}
"""The fields of Llama 3's scaling, and ours."""
