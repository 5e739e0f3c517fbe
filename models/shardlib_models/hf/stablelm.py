"""StableLM: gated MLPs under LayerNorm, partial rotary positions, scales of each head."""

import dataclasses

from shardlib.hf import Field, rows
from shardlib_models.hf.decoder_fields import rope, without
from shardlib_models.hf.llama import LLAMA

_LAYER = "model.layers.{layers}"
_ROWS = rows(f"""
layers/attention_norm/bias  {_LAYER}.input_layernorm.bias  norm
layers/attention/query_norm/scale  {_LAYER}.self_attn.q_layernorm.norms.{{heads}}.weight  head_dim
layers/attention/key_norm/scale  {_LAYER}.self_attn.k_layernorm.norms.{{kv_heads}}.weight  head_dim
layers/mlp_norm/bias  {_LAYER}.post_attention_layernorm.bias  norm
final_norm/bias  model.norm.bias  norm
""")

STABLELM = dataclasses.replace(
    LLAMA,
    name="StableLmForCausalLM",
    model_type="stablelm",
    fields={
        **without(LLAMA.fields, "rms_norm_eps", "head_dim"),
        "layer_norm_eps": Field("norm_eps", 1e-5),
        "use_qkv_bias": Field("qkv_bias", False),
        "qk_layernorm": Field("qk_norm", False, {False: False, "heads": True}),
        "use_parallel_residual": Field("block", False, {"pre": False, "parallel_one_norm": True}),
    },
    fixed={},
    ours={
        **without(LLAMA.ours, "qkv_bias", "qk_norm", "block", "rotary_dims"),
        "norm": "layer",
        "head_dim": None,
    },
    converters=(rope(partial="partial_rotary_factor", default_partial=0.25),),
    table=lambda config: LLAMA.table(config) + _ROWS,
)
