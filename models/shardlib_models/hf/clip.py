"""CLIP: two encoders in one checkpoint."""

from collections.abc import Mapping
from typing import Any

from shardlib.hf import Architecture, Converter, Field, rows
from shardlib_models.hf.encoder_fields import SIZES, part

_LAYERS = """
{ours}/attention/query/kernel|bias  {theirs}.self_attn.q_proj.weight|bias  (heads*head_dim) embed
{ours}/attention/key/kernel|bias  {theirs}.self_attn.k_proj.weight|bias  (kv_heads*head_dim) embed
{ours}/attention/value/kernel|bias  {theirs}.self_attn.v_proj.weight|bias  (kv_heads*head_dim) embed
{ours}/attention/out/kernel|bias  {theirs}.self_attn.out_proj.weight|bias  (embed) heads*head_dim
{ours}/attention_norm/scale|bias  {theirs}.layer_norm1.weight|bias  (norm)
{ours}/mlp/up/kernel|bias  {theirs}.mlp.fc1.weight|bias  (mlp) embed
{ours}/mlp/down/kernel|bias  {theirs}.mlp.fc2.weight|bias  (embed) mlp
{ours}/mlp_norm/scale|bias  {theirs}.layer_norm2.weight|bias  (norm)
"""
_PATCHES = "vision_model.embeddings"
_ROWS = rows(f"""
{_LAYERS.format(ours="text/layers", theirs="text_model.encoder.layers.{layers}")}
{_LAYERS.format(ours="image/layers", theirs="vision_model.encoder.layers.{layers}")}
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
_SIZES = {name: field for name, field in SIZES.items() if name != "initializer_range"}
_DEFAULTS = {"num_hidden_layers": 12, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_TEXT = _SIZES | {
    "vocab_size": Field("vocab_size", 49408),
    "max_position_embeddings": Field("max_positions", 77),
}
_TEXT_DEFAULTS = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
_IMAGE = _SIZES | {
    "image_size": Field("image_size", 224),
    "patch_size": Field("patch_size", 32),
    "num_channels": Field("channels", 3),
}
_IMAGE_DEFAULTS = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}


def _read_end(theirs: Mapping[str, Any]) -> dict[str, Any]:
    # Files before 2023 say 2 and mean the largest id.
    end = (theirs.get("text_config") or {}).get("eos_token_id", 49407)
    return {"text.end_token": None if end == 2 else end}


def _write_end(config: Any) -> dict[str, Any]:
    end = config.text.end_token
    widths = ("text_config.projection_dim", "vision_config.projection_dim")
    return {
        "text_config.eos_token_id": 2 if end is None else end,
        **dict.fromkeys(widths, config.feature_dim),
    }


CLIP = Architecture(
    name="CLIPModel",
    model_type="clip",
    fields={
        "projection_dim": Field("feature_dim", 512),
        "logit_scale_init_value": Field("init_log_scale", 2.6592),
        **part("text", "text_config", _TEXT, _DEFAULTS | _TEXT_DEFAULTS),
        **part("image", "vision_config", _IMAGE, _DEFAULTS | _IMAGE_DEFAULTS),
    },
    fixed={
        "text_config.model_type": "clip_text_model",
        "text_config.attention_dropout": 0.0,
        "vision_config.model_type": "clip_vision_model",
        "vision_config.attention_dropout": 0.0,
    },
    ours={},
    converters=(Converter(_read_end, _write_end),),
    table=lambda config: _ROWS,
    ignored=("*.position_ids",),
)
