"""ViT with its head for classes of images."""

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.encoder_fields import CLASSES, PIXELS, SIZES, layers

_START = "vit.embeddings"
_PATCHES = f"{_START}.patch_embeddings.projection"
_LAYERS = layers(
    "layers",
    "vit.encoder.layer.{layers}",
    projections="attention.attention.query attention.attention.key attention.attention.value "
    "attention.output.dense",
    mlp="intermediate.dense output.dense",
    norms="layernorm_before layernorm_after",
)
_ROWS = rows(f"""
patches/projection/kernel|bias  {_PATCHES}.weight|bias  (embed) conv_in kernel_h kernel_w
patches/class_token  {_START}.cls_token  1 1 embed
patches/positions  {_START}.position_embeddings  1 positions embed
{_LAYERS}
final_norm/scale|bias  vit.layernorm.weight|bias  (norm)
head/kernel|bias  classifier.weight|bias  (classes) embed
""")

VIT = Architecture(
    name="ViTForImageClassification",
    model_type="vit",
    fields={
        **SIZES,
        **PIXELS,
        "hidden_dropout_prob": Field("dropout", 0.0),
    },
    fixed={"qkv_bias": True},
    converters=(CLASSES,),
    table=lambda config: _ROWS,
    inputs="images",
    ignored=("vit.pooler.*",),
)
