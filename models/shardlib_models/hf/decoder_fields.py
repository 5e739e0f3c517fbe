"""Fields that the tables of decoders share."""

from collections.abc import Mapping
from typing import Any

from shardlib.hf import Converter, Field
from shardlib.nn.attention import LongScaling
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
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_divisor": 1.0,
    "query_scale": None,
    "attention_softcap": None,
    "sinks": False,
    "logit_softcap": None,
    "latent": None,
    "global_every": None,
    "local_rope_theta": None,
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

EXPERTS = {
    "moe.mlp_dim": None,
    "moe.dense_layers": 0,
    "moe.num_shared_experts": 0,
    "moe.shared_mlp_dim": None,
    "moe.shared_gate": False,
    "moe.router_bias": False,
    "moe.scores": "softmax",
    "moe.groups": 1,
    "moe.groups_per_token": 1,
    "moe.group_best": 1,
    "moe.normalize_weights": True,
    "moe.weights_scale": 1.0,
}
"""Our fields of experts as Mixtral has them."""

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
    default_theta: float = 10_000.0,
    *,
    theta: str = "rope_theta",
    partial: str | None = None,
    default_partial: float = 1.0,
) -> Converter:
    """Returns the converter of the fields of rotary positions.

    Args:
        default_theta: The base where config.json names none.
        theta: The field with the base.
        partial: The field with the rotated part of a head; None if all dims must be rotated.
        default_partial: That part where config.json names none.
    """
    return Converter(
        lambda theirs: _read_rope(
            theirs, theirs.get(theta, default_theta), partial, default_partial
        ),
        lambda config: _write_rope(config, theta, partial),
    )


def _read_rope(
    theirs: Mapping[str, Any], theta: float, partial: str | None, default_partial: float
) -> dict[str, Any]:
    fields = rope_fields(theirs)
    theta = fields.get("rope_theta", theirs.get("rope_theta", theta))
    ours: dict[str, Any] = {"rope_theta": theta, "rope_scaling": read_scaling(theirs, fields)}
    part = theirs.get(partial or "partial_rotary_factor", default_partial)
    part = fields.get("partial_rotary_factor", part)
    if partial is None and part != 1.0:
        raise ValueError(f"partial_rotary_factor is {part!r}; supported: 1.0.")
    if partial is not None:
        head_dim = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
        ours["rotary_dims"] = None if part == 1.0 else int(head_dim * part)
    return ours


def rope_fields(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of rotary positions, from `rope_scaling` or else `rope_parameters`.

    Raises:
        ValueError: If they are not an object of plain values: some models have one for each kind of
            layer.
    """
    name = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    fields = theirs.get(name) or {}
    if not isinstance(fields, Mapping):
        raise ValueError(f"{name} is {fields!r}; supported: null or an object.")
    if nested := [key for key, value in fields.items() if isinstance(value, Mapping)]:
        raise ValueError(f"{name} has {nested}; supported: one rotary scaling for all layers.")
    return dict(fields)


def _write_rope(config: TransformerConfig, theta: str, partial: str | None) -> dict[str, Any]:
    theirs = {theta: config.rope_theta, "rope_scaling": write_scaling(config)}
    if partial is not None:
        theirs[partial] = config.rotary_size / config.head_size
    if isinstance(config.rope_scaling, LongScaling):
        theirs["original_max_position_embeddings"] = config.rope_scaling.original_positions
    return theirs


_ORIGINAL = {"original_max_position_embeddings": "original_positions"}
_SCALINGS = {
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
        **_ORIGINAL,
    },
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "beta_fast": "fast_turns",
        "beta_slow": "slow_turns",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
        **_ORIGINAL,
    },
    "longrope": {
        "factor": "factor",
        "short_factor": "short_factors",
        "long_factor": "long_factors",
        **_ORIGINAL,
    },
}
"""The fields of each scaling of rotary positions, and ours."""
_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def read_scaling(theirs: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns our scaling of rotary positions from its fields in config.json.

    Raises:
        ValueError: If the kind or a field is not supported.
    """
    kind = fields.get("rope_type", fields.get("type", "default"))
    # The first configs of Phi-3.
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise ValueError(f"rope_type is {kind!r}; supported: 'default', {str([*_SCALINGS])[1:-1]}.")
    if fields.get("attention_factor") is not None:
        factor = fields["attention_factor"]
        raise ValueError(f"attention_factor of {kind} is {factor!r}; supported: None.")
    original = "original_max_position_embeddings"
    if kind != "linear":
        # The outer field counts if both are there, as in Phi-3.
        inner = fields.get(original, theirs["max_position_embeddings"])
        fields = {**fields, original: theirs.get(original, inner)}
    if kind in ("longrope", "yarn") and fields.get("factor") is None:
        fields = {**fields, "factor": theirs["max_position_embeddings"] / fields[original]}
    given = {
        ours: fields[name]
        for name, ours in _SCALINGS[kind].items()
        if name in fields or name not in _OPTIONAL
    }
    return {"kind": kind, **{ours: value for ours, value in given.items() if value is not None}}


def write_scaling(config: TransformerConfig) -> dict[str, Any] | None:
    """Returns the fields of config.json for the scaling of rotary positions."""
    scaling = config.rope_scaling
    if scaling is None:
        return None
    fields = {name: getattr(scaling, ours) for name, ours in _SCALINGS[scaling.kind].items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    return {"rope_type": scaling.kind, "type": scaling.kind, **fields}


def _read_layer_types(theirs: Mapping[str, Any]) -> dict[str, Any]:
    kinds = set(theirs.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise ValueError(f"layer_types has {sorted(kinds)}; supported: full_attention alone.")
    return {}


ONE_KIND = Converter(_read_layer_types, lambda config: {})
"""The refusal of layers that differ in what they see."""


def windows(default_every: int | None) -> Converter:
    """Returns the converter of the window and of the layers that see all positions.

    Args:
        default_every: Of so many layers the last sees all, where config.json does not say; None if
            no layer does.
    """
    return Converter(
        lambda theirs: _read_windows(theirs, default_every),
        lambda config: _write_windows(config, default_every),
    )


def _read_windows(theirs: Mapping[str, Any], default_every: int | None) -> dict[str, Any]:
    number = theirs["num_hidden_layers"]
    every = theirs.get("sliding_window_pattern") or default_every
    default = [every is None or (layer + 1) % every != 0 for layer in range(number)]
    types = theirs.get("layer_types")
    is_local = default if types is None else [kind == "sliding_attention" for kind in types]
    window = theirs.get("sliding_window", 4096)
    if window is None or not any(is_local):
        return {"window": None, "global_every": None}
    if all(is_local):
        return {"window": window, "global_every": None}
    every = is_local.index(False) + 1
    if is_local != [(layer + 1) % every != 0 for layer in range(number)]:
        raise ValueError(
            f"layer_types is {types}; supported: full_attention in the last of every n layers."
        )
    return {"window": window, "global_every": every}


def _write_windows(config: TransformerConfig, default_every: int | None) -> dict[str, Any]:
    theirs: dict[str, Any] = {}
    # Where layers differ, their kinds tell that none has a window.
    if config.window is not None or default_every is None:
        theirs["sliding_window"] = config.window
    if config.global_every != default_every:
        kinds = {True: "sliding_attention", False: "full_attention"}
        theirs["layer_types"] = [kinds[local] for local in config.is_local]
    if config.global_every is not None:
        theirs["sliding_window_pattern"] = config.global_every
    return theirs
