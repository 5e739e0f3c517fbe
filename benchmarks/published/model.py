"""Model of a published record."""

import re
from collections.abc import Mapping
from typing import Any

from shardlib.cost.workload import Experts, Latent, Transformer


class Unusable(Exception):
    """Error for a record without a field that a prediction needs; the message names the field."""


_INTERLEAVED = re.compile(r"llama-?4.*128e|maverick")
"""Llama 4 Maverick has routed experts in every second layer, which its dims do not tell."""


def model_of(
    row: Mapping[str, Any], model_dims: Mapping[str, Any], assumed: list[str]
) -> Transformer:
    """Returns the model of a record.

    Raises:
        Unusable: If the record has no dims and names no model whose dims are known.
    """
    dims = row.get("dims")
    if not dims:
        dims = _by_name(str(row.get("model") or ""), model_dims)
        if not dims:
            raise Unusable("it gives no dims, and none are known for the model it names")
        assumed.append("dims by the model's name")
    try:
        return _transformer(dims, str(row.get("model") or "").lower())
    except (KeyError, TypeError, ValueError) as error:
        raise Unusable(f"its dims cannot be read: {error!r}") from None


def _by_name(name: str, model_dims: Mapping[str, Any]) -> Mapping[str, Any] | None:
    wanted = _plain(name)
    return next((dims for known, dims in model_dims.items() if _plain(known) == wanted), None)


def _plain(name: str) -> str:
    """Returns a model's name without differences in spelling."""
    name = re.sub(r"\(.*?\)|_|-|\s|\.1\b", "", name.lower()).replace("llama31", "llama3")
    return re.sub(r"^deepseekv?3(671b)?$", "deepseek3", name)


def _transformer(dims: Mapping[str, Any], name: str) -> Transformer:
    layers, embed, heads = int(dims["n_layers"]), int(dims["d_model"]), int(dims["n_heads"])
    mlp = int(dims.get("d_ff_dense") or dims.get("d_ff") or 4 * embed)
    window = dims.get("sliding_window")
    latent = None
    if dims.get("kv_lora_rank"):
        latent = Latent(
            int(dims["q_lora_rank"]),
            int(dims["kv_lora_rank"]),
            int(dims["qk_nope"]),
            int(dims["qk_rope"]),
            int(dims["v_head"]),
        )
    return Transformer(
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=int(dims.get("n_kv_heads") or heads),
        head_dim=int(dims.get("head_dim") or embed // heads),
        mlp=mlp,
        vocab=int(dims["vocab"]),
        gated=bool(dims.get("glu", True)),
        tied=bool(dims.get("tied_embeddings", False)),
        experts=_experts(dims, layers, mlp, name),
        latent=latent,
        window=int(window) if window else None,
        windowed_layers=layers * 5 // 6 if window else 0,
        learned_positions=2048 if dims.get("learned_pos_emb") else 0,
    )


def _experts(dims: Mapping[str, Any], layers: int, mlp: int, name: str) -> Experts | None:
    if not dims.get("num_experts"):
        return None
    hidden = int(dims.get("d_ff_expert") or dims.get("d_ff") or mlp)
    dense = int(dims.get("first_dense_layers") or 0)
    if _INTERLEAVED.search(name):
        dense = layers // 2
    return Experts(
        number=int(dims["num_experts"]),
        per_token=int(dims["top_k"]),
        mlp=hidden,
        shared_mlp=hidden * int(dims.get("shared_experts") or 0),
        dense_layers=dense,
        groups=(int(dims.get("expert_groups") or 1), int(dims.get("groups_per_token") or 1)),
    )
