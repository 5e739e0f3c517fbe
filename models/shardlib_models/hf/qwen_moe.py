"""Qwen 2 and 3 with experts."""

import dataclasses

from shardlib.hf import Field, rows
from shardlib_models.hf.decoder_fields import EXPERTS, without
from shardlib_models.hf.expert_rows import expert_rows
from shardlib_models.hf.llama import LLAMA, QWEN2, QWEN3

_GATE = "model.layers.{layers}.mlp.shared_expert_gate.weight"
_ROWS = expert_rows("shared_expert") + rows(
    f"layers/mlp/shared_gate/kernel  {_GATE}  shared_gate embed"
)
_FIELDS = {
    "num_experts": Field("moe.num_experts", aliases=("num_local_experts",)),
    "num_experts_per_tok": Field("moe.experts_per_token"),
    "moe_intermediate_size": Field("moe.mlp_dim"),
    "norm_topk_prob": Field("moe.normalize_weights", False),
}
_FIXED = {"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
_OURS = without(EXPERTS, "moe.mlp_dim", "moe.normalize_weights")

QWEN2_MOE = dataclasses.replace(
    LLAMA,
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    fields={
        **LLAMA.fields,
        **_FIELDS,
        "shared_expert_intermediate_size": Field("moe.shared_mlp_dim"),
    },
    fixed={**_FIXED, "qkv_bias": True},
    ours={
        **without(QWEN2.ours, "moe"),
        **without(_OURS, "moe.shared_mlp_dim"),
        "moe.shared_gate": True,
    },
    table=lambda config: LLAMA.table(config) + _ROWS,
)

QWEN3_MOE = dataclasses.replace(
    QWEN2_MOE,
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields={**LLAMA.fields, **_FIELDS},
    fixed={**_FIXED, "attention_bias": False},
    ours={**without(QWEN3.ours, "moe"), **_OURS},
)
