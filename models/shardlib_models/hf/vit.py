"""ViT with its head for classes of images."""

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.encoder_fields import CLASSES, SIZES

_START, _LAYER = "vit.embeddings", "vit.encoder.layer.{layers}"
_PATCHES = f"{_START}.patch_embeddings.projection"
_ROWS = rows(f"""
patches/projection/kernel  {_PATCHES}.weight  embed conv_in kernel_h kernel_w
patches/projection/bias  {_PATCHES}.bias  embed
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
layers/attention_norm/scale  {_LAYER}.layernorm_before.weight  norm
layers/attention_norm/bias  {_LAYER}.layernorm_before.bias  norm
layers/mlp/up/kernel  {_LAYER}.intermediate.dense.weight  mlp embed
layers/mlp/up/bias  {_LAYER}.intermediate.dense.bias  mlp
layers/mlp/down/kernel  {_LAYER}.output.dense.weight  embed mlp
layers/mlp/down/bias  {_LAYER}.output.dense.bias  embed
layers/mlp_norm/scale  {_LAYER}.layernorm_after.weight  norm
layers/mlp_norm/bias  {_LAYER}.layernorm_after.bias  norm
final_norm/scale  vit.layernorm.weight  norm
final_norm/bias  vit.layernorm.bias  norm
head/kernel  classifier.weight  classes embed
head/bias  classifier.bias  classes
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
