"""CLIP: two encoders in one checkpoint."""

from typing import Any

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.encoder_fields import PIXELS, SIZES, layers, part

_LAYERS = {
    "projections": "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
    "mlp": "mlp.fc1 mlp.fc2",
    "norms": "layer_norm1 layer_norm2",
}
_PATCHES = "vision_model.embeddings"
_ROWS = rows(f"""
{layers("text/layers", "text_model.encoder.layers.{layers}", **_LAYERS)}
{layers("image/layers", "vision_model.encoder.layers.{layers}", **_LAYERS)}
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


def _sizes(width: int) -> dict[str, Any]:
    """Returns what config.json may leave out of an encoder of a width."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 12}
    others = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32}
    return {**sizes, **others, "num_attention_heads": width // 64}


_TEXT = {
    "vocab_size": Field("vocab_size", 49408),
    "max_position_embeddings": Field("max_positions", 77),
    # Files before 2023 say 2 and mean the largest id.
    "eos_token_id": Field("end_token", 49407, {None: 2}, others=True),
}

CLIP = Architecture(
    name="CLIPModel",
    model_type="clip",
    fields={
        # The last one is read, the others are copies.
        "text_config.projection_dim": Field("feature_dim", 512),
        "vision_config.projection_dim": Field("feature_dim", 512),
        "projection_dim": Field("feature_dim", 512),
        "logit_scale_init_value": Field("init_log_scale", 2.6592),
        **part("text", "text_config", SIZES | _TEXT, _sizes(512)),
        **part("image", "vision_config", SIZES | PIXELS, _sizes(768)),
    },
    fixed={f"{one}_config.model_type": f"clip_{one}_model" for one in ("text", "vision")},
    table=lambda config: _ROWS,
    ignored=("*.position_ids",),
)
