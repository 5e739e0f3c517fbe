"""gpt-oss: sinks, alternating windows, and experts with gate and up in alternating columns."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.hf import Converter, Field, rows
from shardlib_models.hf.decoder_fields import EXPERTS, rope, windows, without
from shardlib_models.hf.llama import LLAMA

_LAYER = "model.layers.{layers}"
_EXPERTS = f"{_LAYER}.mlp.experts"
_ROWS = rows(f"""
layers/attention/sinks  {_LAYER}.self_attn.sinks  heads
layers/attention/out/bias  {_LAYER}.self_attn.o_proj.bias  embed
layers/mlp/router/kernel|bias  {_LAYER}.mlp.router.weight|bias  (expert) embed
layers/mlp/experts/gate  {_EXPERTS}.gate_up_proj  expert embed mlp*+
layers/mlp/experts/up  {_EXPERTS}.gate_up_proj  expert embed mlp*+
layers/mlp/experts/down  {_EXPERTS}.down_proj  expert mlp embed
layers/mlp/experts/gate_bias  {_EXPERTS}.gate_up_proj_bias  expert mlp*+
layers/mlp/experts/up_bias  {_EXPERTS}.gate_up_proj_bias  expert mlp*+
layers/mlp/experts/down_bias  {_EXPERTS}.down_proj_bias  expert embed
""")


def _read_windows(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return windows(2).read({"sliding_window": 128, **theirs})


GPT_OSS = dataclasses.replace(
    LLAMA,
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    fields={
        **without(LLAMA.fields, "hidden_act"),
        "num_local_experts": Field("moe.num_experts", aliases=("num_experts",)),
        "num_experts_per_tok": Field("moe.experts_per_token"),
    },
    # hidden_act is silu in published files, and not read.
    fixed={"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    ours={
        **without(LLAMA.ours, "moe", "window", "global_every"),
        **EXPERTS,
        "activation": "clamped_swiglu",
        "sinks": True,
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "moe.router_bias": True,
    },
    converters=(rope(150_000.0), Converter(_read_windows, windows(2).write)),
    table=lambda config: LLAMA.table(config) + _ROWS,
)
