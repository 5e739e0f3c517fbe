"""Llama, and decoders that differ from it by a field: Mistral, Mixtral, Qwen 2 and 3."""

import dataclasses

from shardlib.hf import Architecture, Field, rows
from shardlib_models.hf.decoder_fields import (
    ACTIVATIONS,
    EXPERTS,
    ONE_KIND,
    PLAIN,
    SIZES,
    rope,
    windows,
    without,
)

_LAYER = "model.layers.{layers}"
_EXPERTS = f"{_LAYER}.block_sparse_moe"
_ROWS = rows(f"""
token_embedding/embedding  model.embed_tokens.weight  vocab embed
layers/attention_norm/scale  {_LAYER}.input_layernorm.weight  norm
layers/attention/query/kernel|bias  {_LAYER}.self_attn.q_proj.weight|bias  (heads*head_dim) embed
layers/attention/key/kernel|bias  {_LAYER}.self_attn.k_proj.weight|bias  (kv_heads*head_dim) embed
layers/attention/value/kernel|bias  {_LAYER}.self_attn.v_proj.weight|bias  (kv_heads*head_dim) embed
layers/attention/out/kernel  {_LAYER}.self_attn.o_proj.weight  embed heads*head_dim
layers/attention/query_norm/scale  {_LAYER}.self_attn.q_norm.weight  norm
layers/attention/key_norm/scale  {_LAYER}.self_attn.k_norm.weight  norm
layers/mlp_norm/scale  {_LAYER}.post_attention_layernorm.weight  norm
layers/mlp/gate/kernel  {_LAYER}.mlp.gate_proj.weight  mlp embed
layers/mlp/up/kernel  {_LAYER}.mlp.up_proj.weight  mlp embed
layers/mlp/down/kernel  {_LAYER}.mlp.down_proj.weight  embed mlp
layers/mlp/router/kernel  {_EXPERTS}.gate.weight  expert embed
layers/mlp/experts/gate  {_EXPERTS}.experts.{{expert}}.w1.weight  mlp embed
layers/mlp/experts/up  {_EXPERTS}.experts.{{expert}}.w3.weight  mlp embed
layers/mlp/experts/down  {_EXPERTS}.experts.{{expert}}.w2.weight  embed mlp
final_norm/scale  model.norm.weight  norm
head/kernel  lm_head.weight  vocab embed
""")

LLAMA = Architecture(
    name="LlamaForCausalLM",
    model_type="llama",
    fields={**SIZES, "hidden_act": Field("activation", "silu", ACTIVATIONS)},
    fixed={"attention_bias": False, "mlp_bias": False},
    ours={**PLAIN, "window": None, "moe": None},
    converters=(rope(), ONE_KIND),
    table=lambda config: _ROWS,
    tied={"model.embed_tokens.weight": "lm_head.weight"},
    ignored=("*.rotary_emb.inv_freq",),
)

MISTRAL = dataclasses.replace(
    LLAMA,
    name="MistralForCausalLM",
    model_type="mistral",
    fixed={},
    ours=without(LLAMA.ours, "window", "global_every"),
    converters=(rope(), windows(None)),
)

MIXTRAL = dataclasses.replace(
    MISTRAL,
    name="MixtralForCausalLM",
    model_type="mixtral",
    fields={
        **MISTRAL.fields,
        "sliding_window": Field("window", None),
        "num_local_experts": Field("moe.num_experts"),
        "num_experts_per_tok": Field("moe.experts_per_token"),
    },
    converters=(rope(1e6), ONE_KIND),
    ours={
        **without(LLAMA.ours, "window", "moe"),
        **EXPERTS,
    },
)

QWEN2 = dataclasses.replace(
    LLAMA,
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    fixed={"use_sliding_window": False},
    ours={**LLAMA.ours, "qkv_bias": True},
)

QWEN3 = dataclasses.replace(
    QWEN2,
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    fixed={"use_sliding_window": False, "attention_bias": False},
    ours={**LLAMA.ours, "qk_norm": True},
)
