"""Properties of a transformer that follow from its config: FLOPs and choices on a mesh."""

import math
from typing import Any

import jax

from shardlib.errors import ModelError
from shardlib.nn.attention import ContextPlan, plan_context, resolve_backend
from shardlib.registry import DataSpec
from shardlib_models import moe
from shardlib_models.layers import num_parts
from shardlib_models.transformer_config import TransformerConfig


def flops_per_example(config: TransformerConfig, data: DataSpec) -> float:
    """Returns the model FLOPs of one sequence, forward and backward, by the causal convention.

    The count is 6 FLOPs for each weight of a matmul and token, including logits but not lookups,
    and only the experts of a token. Causal attention adds 12 for each pair of positions that it
    needs, each head and each of its dims: length**2 / 2 pairs, or fewer with a window. The
    recomputation of rematerialisation is not counted, and document borders are ignored.

    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1; Chowdhery et al.
    2022, "PaLM", appendix B, whose attention term counts all pairs, twice as many as here.

    Raises:
        ModelError: If the data do not set the length of a sequence.
    """
    length = data.sequence_length
    if length is None:
        raise ModelError(
            "the FLOPs of a sequence depend on its length, which the data do not set.\n"
            "  Give DataSpec(sequence_length=...)."
        )
    routed = 0
    num_dense = config.num_layers
    if config.moe is not None:
        num_dense = config.num_dense_layers
        routed = moe.active_weights(config.moe, config.embed_dim, config.mlp_size)
    mlp = (3 if config.mlp == "gated" else 2) * config.embed_dim * config.mlp_size
    weights = config.num_layers * _attention_weights(config)
    weights += num_dense * mlp + (config.num_layers - num_dense) * routed
    weights += config.embed_dim * config.vocabulary(data)
    windows = [config.window if local else None for local in config.is_local]
    pairs = sum(_pairs(length, min(length, window or length)) for window in windows)
    # Two matmuls of 2 FLOPs, forward and twice backward.
    attended = 6.0 * pairs * config.num_heads * (config.head_size + config.value_size)
    return 6.0 * weights * length + attended


def _pairs(length: int, window: int) -> float:
    return length * window - window**2 / 2


def _attention_weights(config: TransformerConfig) -> int:
    """Returns the weights of the projections of one layer's attention."""
    latent, heads = config.latent, config.num_heads
    if latent is None:
        return 2 * config.embed_dim * (heads + config.kv_heads) * config.head_size
    weights = config.embed_dim * (latent.kv_rank + latent.rotary_dims)
    weights += latent.kv_rank * heads * (latent.plain_dims + latent.value_dim)
    weights += heads * latent.value_dim * config.embed_dim
    if latent.query_rank is None:
        return weights + config.embed_dim * heads * config.head_size
    return weights + latent.query_rank * (config.embed_dim + heads * config.head_size)


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
