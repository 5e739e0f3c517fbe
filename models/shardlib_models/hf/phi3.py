"""Phi-3, whose query, key and value are one tensor, and gate and up another."""

import dataclasses

from shardlib.hf import Field, rows
from shardlib_models.hf.decoder_fields import ONE_KIND, rope, without
from shardlib_models.hf.llama import LLAMA

_LAYER = "model.layers.{layers}"
_ROWS = rows(f"""
layers/attention/query/kernel  {_LAYER}.self_attn.qkv_proj.weight  +heads*head_dim embed
layers/attention/key/kernel  {_LAYER}.self_attn.qkv_proj.weight  +kv_heads*head_dim embed
layers/attention/value/kernel  {_LAYER}.self_attn.qkv_proj.weight  +kv_heads*head_dim embed
layers/mlp/gate/kernel  {_LAYER}.mlp.gate_up_proj.weight  +mlp embed
layers/mlp/up/kernel  {_LAYER}.mlp.gate_up_proj.weight  +mlp embed
""")

PHI3 = dataclasses.replace(
    LLAMA,
    name="Phi3ForCausalLM",
    model_type="phi3",
    fields={**LLAMA.fields, "sliding_window": Field("window", None)},
    fixed={"attention_bias": False},
    ours=without(LLAMA.ours, "window", "rotary_dims"),
    converters=(rope(partial="partial_rotary_factor"), ONE_KIND),
    # A later row of a parameter takes the place of an earlier one.
    table=lambda config: LLAMA.table(config) + _ROWS,
)
