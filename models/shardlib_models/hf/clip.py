"""CLIP: two encoders in one checkpoint."""

from collections.abc import Mapping
from typing import Any

from shardlib.hf import Architecture, Converter, Field, rows
from shardlib_models.hf.encoder_fields import ACTIVATIONS

_LAYERS = """
{ours}/layers/attention/query/kernel  {one}.self_attn.q_proj.weight  heads*head_dim embed
{ours}/layers/attention/query/bias  {one}.self_attn.q_proj.bias  heads*head_dim
{ours}/layers/attention/key/kernel  {one}.self_attn.k_proj.weight  kv_heads*head_dim embed
{ours}/layers/attention/key/bias  {one}.self_attn.k_proj.bias  kv_heads*head_dim
{ours}/layers/attention/value/kernel  {one}.self_attn.v_proj.weight  kv_heads*head_dim embed
{ours}/layers/attention/value/bias  {one}.self_attn.v_proj.bias  kv_heads*head_dim
{ours}/layers/attention/out/kernel  {one}.self_attn.out_proj.weight  embed heads*head_dim
{ours}/layers/attention/out/bias  {one}.self_attn.out_proj.bias  embed
{ours}/layers/attention_norm/scale|bias  {one}.layer_norm1.weight|bias  (norm)
{ours}/layers/mlp/up/kernel|bias  {one}.mlp.fc1.weight|bias  (mlp) embed
{ours}/layers/mlp/down/kernel|bias  {one}.mlp.fc2.weight|bias  (embed) mlp
{ours}/layers/mlp_norm/scale|bias  {one}.layer_norm2.weight|bias  (norm)
"""
_PATCHES = "vision_model.embeddings"
_ROWS = (
    rows(_LAYERS.format(ours="text", one="text_model.encoder.layers.{layers}"))
    + rows(_LAYERS.format(ours="image", one="vision_model.encoder.layers.{layers}"))
    + rows(f"""
text/token_embedding/embedding  text_model.embeddings.token_embedding.weight  vocab embed
text/positions  text_model.embeddings.position_embedding.weight  positions embed
text/final_norm/scale|bias  text_model.final_layer_norm.weight|bias  (norm)
text/projection/kernel  text_projection.weight  features embed
image/patches/projection/kernel  {_PATCHES}.patch_embedding.weight  embed conv_in kernel_h kernel_w
image/patches/class_token  {_PATCHES}.class_embedding  embed
image/patches/positions  {_PATCHES}.position_embedding.weight  positions embed
image/first_norm/scale|bias  vision_model.pre_layrnorm.weight|bias  (norm)
image/final_norm/scale|bias  vision_model.post_layernorm.weight|bias  (norm)
image/projection/kernel  visual_projection.weight  features embed
log_scale  logit_scale
""")
)
# Of each encoder: the names and defaults in config.json by our fields.
_SHARED = {
    "num_layers": ("num_hidden_layers", 12),
    "embed_dim": ("hidden_size", 512),
    "mlp_dim": ("intermediate_size", 2048),
    "num_heads": ("num_attention_heads", 8),
    "norm_eps": ("layer_norm_eps", 1e-5),
}
_TEXT = _SHARED | {
    "vocab_size": ("vocab_size", 49408),
    "max_positions": ("max_position_embeddings", 77),
}
_IMAGE = _SHARED | {
    "embed_dim": ("hidden_size", 768),
    "mlp_dim": ("intermediate_size", 3072),
    "num_heads": ("num_attention_heads", 12),
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 32),
    "channels": ("num_channels", 3),
}
_KEYS = {"text": ("text_config", _TEXT), "image": ("vision_config", _IMAGE)}


def _read(theirs: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for ours, (key, names) in _KEYS.items():
        given = theirs.get(key) or {}
        act = given.get("hidden_act", "quick_gelu")
        known = {value: name for name, value in ACTIVATIONS.items()}
        if act not in known:
            raise ValueError(f"{key}: hidden_act is {act!r}; supported: {', '.join(known)}.")
        if given.get("attention_dropout"):
            raise ValueError(f"{key}: attention_dropout is not 0, which shardlib does not have.")
        fields |= {f"{ours}.{own}": given.get(name, value) for own, (name, value) in names.items()}
        fields[f"{ours}.activation"] = known[act]
    # Files before 2023 say 2 and mean the largest id.
    end = (theirs.get("text_config") or {}).get("eos_token_id", 49407)
    return fields | {"text.end_token": None if end == 2 else end}


def _write(config: Any) -> dict[str, Any]:
    theirs: dict[str, Any] = {}
    for ours, (key, names) in _KEYS.items():
        part = getattr(config, ours)
        theirs[key] = {name: getattr(part, own) for own, (name, _) in names.items()}
        theirs[key] |= {
            "intermediate_size": part.mlp_size,
            "hidden_act": ACTIVATIONS[part.activation],
            "projection_dim": config.feature_dim,
            "model_type": "clip_text_model" if ours == "text" else "clip_vision_model",
        }
    end = config.text.end_token
    theirs["text_config"]["eos_token_id"] = 2 if end is None else end
    return theirs


CLIP = Architecture(
    name="CLIPModel",
    model_type="clip",
    fields={
        "projection_dim": Field("feature_dim", 512),
        "logit_scale_init_value": Field("init_log_scale", 2.6592),
    },
    fixed={},
    ours={},
    converters=(Converter(_read, _write),),
    table=lambda config: _ROWS,
    ignored=("*.position_ids",),
)
