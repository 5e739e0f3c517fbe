"""Properties of a transformer that follow from its config: dims and choices on a mesh."""

import math
from typing import Any

import jax

from shardlib.nn.attention import ContextPlan, plan_context, resolve_backend
from shardlib.registry import DataSpec
from shardlib_models.layers import num_parts
from shardlib_models.transformer_config import TransformerConfig


def dims(config: TransformerConfig, data: DataSpec) -> dict[str, Any]:
    """Returns the dims of a transformer by the names of `shardlib.plan.Transformer`."""
    found: dict[str, Any] = {
        "layers": config.num_layers,
        "embed": config.embed_dim,
        "heads": config.num_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_size,
        "mlp": config.mlp_size,
        "vocab": config.vocabulary(data),
        "gated": config.mlp == "gated" or config.moe is not None,
        "tied": config.tied_embeddings,
        "learned_positions": 0,
        "activation": config.activation,
        "qk_norm": bool(config.qk_norm),
        "sandwich": config.block == "sandwich",
    }
    if config.positions == "learned":
        found["learned_positions"] = config.max_positions
    if config.window is not None:
        found |= {"window": config.window, "windowed_layers": sum(config.is_local)}
    if config.latent is not None:
        found["latent"] = {
            "query_rank": config.latent.query_rank or 0,
            "kv_rank": config.latent.kv_rank,
            "head_nope": config.latent.plain_dims,
            "head_rope": config.latent.rotary_dims,
            "head_value": config.latent.value_dim,
        }
    if config.moe is not None:
        width = config.moe.expert_size(config.mlp_size)
        found["experts"] = {
            "number": config.moe.num_experts,
            "per_token": config.moe.experts_per_token,
            "dense_layers": config.moe.dense_layers,
            "mlp": width,
            "shared_mlp": config.moe.shared_size(config.mlp_size),
        }
    return found


def plan(config: TransformerConfig, length: int) -> ContextPlan:
    """Returns the plan by which devices along the active mesh's `context` axis share rows of
    `length` tokens."""
    # Experts with a capacity take tokens in row order, which must be preserved.
    in_order = config.moe is not None and config.moe.dispatch == "capacity"
    return plan_context(
        length,
        config.num_heads,
        config.kv_heads,
        window=None if config.global_every else config.window,
        dropout=config.dropout,
        context=config.context,
        backend=config.attention,
        order="contiguous" if in_order else None,
    )


def kv_copies(config: TransformerConfig) -> int:
    """Returns the number of times each key-value head is computed, once per device that reads it.

    If the active rules cut the query heads into more parts than there are key-value heads, groups
    of devices share one. Each computes what its own query heads read, from weights that all hold,
    so keys and values are not sent.
    """
    heads, kv_heads = config.num_heads, config.kv_heads
    parts = num_parts("heads", heads)
    copies = math.lcm(kv_heads, parts) // kv_heads
    return copies if num_parts("kv_heads", kv_heads * copies) == parts else 1


def choices(
    config: TransformerConfig, data: DataSpec, *, dtype: jax.typing.DTypeLike
) -> dict[str, str]:
    """Returns the model's own choices on the active mesh, each with the reason."""
    length = data.sequence_length
    lengths = () if length is None else (length, length)
    found = {}
    if length is not None:
        shared = plan(config, length)
        if shared.method != "none":
            found["context"] = shared.reason
    if found.get("context") is None or shared.method == "ulysses":
        resolved = resolve_backend(
            config.attention,
            dtype=dtype,
            head_dim=config.head_size,
            value_dim=config.value_size,
            softcap=config.attention_softcap,
            sinks=config.sinks,
            masked=True,
            lengths=lengths,
        )
        found["attention"] = f"{resolved.backend}: {resolved.reason}"
    copies = kv_copies(config)
    if copies > 1:
        parts = num_parts("heads", config.num_heads)
        found["kv_heads"] = (
            f"each computed on {copies} devices: {config.kv_heads} key-value heads do not divide "
            f"into the {parts} parts of the query heads"
        )
    return found
