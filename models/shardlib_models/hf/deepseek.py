"""DeepSeek V2 and V3: latent attention, dense first layers, experts in groups."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from shardlib.errors import ModelError
from shardlib.hf import Converter, Field, TensorRow, rows
from shardlib.nn.attention import YarnScaling
from shardlib_models.hf.decoder_fields import read_scaling, rope, rope_fields, without
from shardlib_models.hf.expert_rows import dense_first, expert_rows
from shardlib_models.hf.llama import LLAMA
from shardlib_models.transformer_config import TransformerConfig

_LAYER = "model.layers.{layers}"
_ROWS = rows(f"""
layers/attention/query/kernel  {_LAYER}.self_attn.q_proj.weight  heads*head_dim embed
layers/attention/query_down/kernel  {_LAYER}.self_attn.q_a_proj.weight  latent embed
layers/attention/query_norm/scale  {_LAYER}.self_attn.q_a_layernorm.weight  norm
layers/attention/kv_down/kernel  {_LAYER}.self_attn.kv_a_proj_with_mqa.weight  latent embed
layers/attention/kv_norm/scale  {_LAYER}.self_attn.kv_a_layernorm.weight  norm
layers/attention/kv_up/kernel  {_LAYER}.self_attn.kv_b_proj.weight  heads*head_dim latent
layers/mlp/router_bias  {_LAYER}.mlp.gate.e_score_correction_bias  expert
""")
_QUERY_UP = rows(
    f"layers/attention/query/kernel  {_LAYER}.self_attn.q_b_proj.weight  heads*head_dim latent"
)


def _table(config: TransformerConfig) -> tuple[TensorRow, ...]:
    assert config.latent is not None
    up = _QUERY_UP if config.latent.query_rank is not None else ()
    table = (*LLAMA.table(config), *_ROWS, *up, *expert_rows("shared_experts"))
    return tuple(dense_first(table, config.num_dense_layers))


def _scale(scaling: YarnScaling | None, head_size: int) -> float | None:
    """Returns the factor of the scores, which YaRN sharpens; None for the default."""
    if scaling is None or not scaling.mscale_all_dim:
        return None
    return scaling.sharpening(scaling.mscale_all_dim) ** 2 / math.sqrt(head_size)


def _read_scale(theirs: Mapping[str, Any]) -> dict[str, Any]:
    ours = read_scaling(theirs, rope_fields(theirs))
    if ours is not None and ours["kind"] != "yarn":
        raise ValueError(f"rope_type is {ours['kind']!r}; supported: 'default', 'yarn'.")
    size = theirs["qk_nope_head_dim"] + theirs["qk_rope_head_dim"]
    return {"query_scale": _scale(None if ours is None else YarnScaling(**ours), size)}


def _write_scale(config: TransformerConfig) -> dict[str, Any]:
    expected = _scale(config.rope_scaling, config.head_size)
    if config.query_scale != expected:
        raise ModelError(f"query_scale is {config.query_scale!r}, but DeepSeek has {expected!r}.")
    # The layers that predict further tokens are not read.
    return {"num_nextn_predict_layers": 0, "head_dim": config.rotary_size}


_FIELDS = {
    **without(LLAMA.fields, "num_key_value_heads", "head_dim"),
    "q_lora_rank": Field("latent.query_rank", 1536),
    "kv_lora_rank": Field("latent.kv_rank", 512),
    "qk_nope_head_dim": Field("latent.plain_dims", 128),
    "qk_rope_head_dim": Field("latent.rotary_dims", 64),
    "v_head_dim": Field("latent.value_dim", 128),
    "n_routed_experts": Field("moe.num_experts"),
    "num_experts_per_tok": Field("moe.experts_per_token"),
    "moe_intermediate_size": Field("moe.mlp_dim"),
    "n_shared_experts": Field("moe.num_shared_experts"),
    "routed_scaling_factor": Field("moe.weights_scale"),
    "first_k_dense_replace": Field("moe.dense_layers"),
}
_OURS = {
    **without(LLAMA.ours, "latent", "query_scale", "moe", "rotary_interleaved"),
    "moe.shared_mlp_dim": None,
    "moe.shared_gate": False,
    "moe.router_bias": False,
}

DEEPSEEK_V3 = dataclasses.replace(
    LLAMA,
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    fields={
        **_FIELDS,
        "norm_topk_prob": Field("moe.normalize_weights", True),
        "rope_interleave": Field("rotary_interleaved", True),
        "n_group": Field("moe.groups"),
        "topk_group": Field("moe.groups_per_token"),
    },
    fixed={
        "attention_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    ours={**_OURS, "moe.scores": "sigmoid", "moe.balance": "bias", "moe.group_best": 2},
    converters=(rope(), Converter(_read_scale, _write_scale)),
    table=_table,
    ignored=(*LLAMA.ignored, "model.layers.{num_layers}.*"),
)


def _read_groups(theirs: Mapping[str, Any]) -> dict[str, Any]:
    method = theirs.get("topk_method", "greedy")
    if method == "greedy":
        return {"moe.groups": 1, "moe.groups_per_token": 1}
    if method != "group_limited_greedy":
        raise ValueError(f"topk_method is {method!r}; supported: 'greedy', 'group_limited_greedy'.")
    return {"moe.groups": theirs["n_group"], "moe.groups_per_token": theirs["topk_group"]}


def _write_groups(config: TransformerConfig) -> dict[str, Any]:
    assert config.moe is not None
    method = "greedy" if config.moe.groups == 1 else "group_limited_greedy"
    groups = {"n_group": config.moe.groups, "topk_group": config.moe.groups_per_token}
    return {"topk_method": method, **groups}


DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    fields=_FIELDS,
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    ours={
        **_OURS,
        "rotary_interleaved": True,
        "moe.scores": "softmax",
        "moe.normalize_weights": False,
        "moe.group_best": 1,
    },
    converters=(*DEEPSEEK_V3.converters, Converter(_read_groups, _write_groups)),
)
