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


def rope(
    default_theta: float = 10_000.0, *, partial: str | None = None, default_partial: float = 1.0
) -> Converter:
    """Returns the converter of the fields of rotary positions.

    Args:
        default_theta: The base where config.json names none.
        partial: The field with the rotated part of a head; None if all dims must be rotated.
        default_partial: That part where config.json names none.
    """
    return Converter(
        lambda theirs: _read_rope(theirs, default_theta, partial, default_partial),
        lambda config: _write_rope(config, partial),
    )


def _read_rope(
    theirs: Mapping[str, Any], default_theta: float, partial: str | None, default_partial: float
) -> dict[str, Any]:
    # transformers 5 joins the fields of version 4 in `rope_parameters`.
    fields: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(given := theirs.get(name) or {}, Mapping):
            raise ValueError(f"{name} is {given!r}; supported: null or an object.")
        fields |= given
    theta = fields.get("rope_theta", theirs.get("rope_theta", default_theta))
    ours: dict[str, Any] = {"rope_theta": theta, "rope_scaling": None}
    part = theirs.get(partial or "partial_rotary_factor", default_partial)
    part = fields.get("partial_rotary_factor", part)
    if partial is None and part != 1.0:
        raise ValueError(f"partial_rotary_factor is {part!r}; supported: 1.0.")
    if partial is not None:
        head_dim = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
        ours["rotary_dims"] = None if part == 1.0 else int(head_dim * part)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "llama3":
        ours["rope_scaling"] = {name: fields[field] for field, name in _LLAMA3.items()}
    elif kind != "default":
        raise ValueError(f"rope_type is {kind!r}; supported: 'default', 'llama3'.")
    return ours


def _write_rope(config: TransformerConfig, partial: str | None) -> dict[str, Any]:
    theirs: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": None}
    if partial is not None:
        theirs[partial] = config.rotary_size / config.head_size
    if config.rope_scaling is not None:
        fields = {field: getattr(config.rope_scaling, name) for field, name in _LLAMA3.items()}
        theirs["rope_scaling"] = {"rope_type": "llama3", **fields}
    return theirs


_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_positions",
}
"""The fields of Llama 3's scaling, and ours."""
