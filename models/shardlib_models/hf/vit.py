"""ViT with its head for classes of images."""

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.encoder_fields import CLASSES, SIZES

_START, _LAYER = "vit.embeddings", "vit.encoder.layer.{layers}"
_PATCHES = f"{_START}.patch_embeddings.projection"
_ROWS = rows(f"""
patches/projection/kernel|bias  {_PATCHES}.weight|bias  (embed) conv_in kernel_h kernel_w
patches/class_token  {_START}.cls_token  1 1 embed
patches/positions  {_START}.position_embeddings  1 positions embed
layers/attention/query/kernel  {_LAYER}.attention.attention.query.weight  heads*head_dim embed
layers/attention/query/bias  {_LAYER}.attention.attention.query.bias  heads*head_dim
layers/attention/key/kernel  {_LAYER}.attention.attention.key.weight  kv_heads*head_dim embed
layers/attention/key/bias  {_LAYER}.attention.attention.key.bias  kv_heads*head_dim
layers/attention/value/kernel  {_LAYER}.attention.attention.value.weight  kv_heads*head_dim embed
layers/attention/value/bias  {_LAYER}.attention.attention.value.bias  kv_heads*head_dim
layers/attention/out/kernel  {_LAYER}.attention.output.dense.weight  embed heads*head_dim
layers/attention/out/bias  {_LAYER}.attention.output.dense.bias  embed
layers/attention_norm/scale|bias  {_LAYER}.layernorm_before.weight|bias  (norm)
layers/mlp/up/kernel|bias  {_LAYER}.intermediate.dense.weight|bias  (mlp) embed
layers/mlp/down/kernel|bias  {_LAYER}.output.dense.weight|bias  (embed) mlp
layers/mlp_norm/scale|bias  {_LAYER}.layernorm_after.weight|bias  (norm)
final_norm/scale|bias  vit.layernorm.weight|bias  (norm)
head/kernel|bias  classifier.weight|bias  (classes) embed
""")

VIT = Architecture(
    name="ViTForImageClassification",
    model_type="vit",
    fields={
        **SIZES,
        "image_size": Field("image_size", 224),
        "patch_size": Field("patch_size", 16),
        "num_channels": Field("channels", 3),
        "hidden_dropout_prob": Field("dropout", 0.0),
    },
    fixed={"qkv_bias": True},
    ours={},
    converters=(CLASSES,),
    table=lambda config: _ROWS,
    inputs="images",
    ignored=("vit.pooler.*",),
)
