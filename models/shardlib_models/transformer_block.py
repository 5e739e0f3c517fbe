"""One layer of a transformer: attention and MLP, each added to the residual stream."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.nn.attention import Order, attend, rotate
from shardlib.nn.attention.rotary import Rotations
from shardlib.nn.moe import RouterStats
from shardlib.nn.remat import tag
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import (
    Linear,
    Norm,
    dropout,
    residual,
    residual_stddev,
    whole,
)
from shardlib_models.moe import MoE
from shardlib_models.transformer_config import TransformerConfig
from shardlib_models.transformer_facts import kv_copies

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class Context(NamedTuple):
    """Values that all layers share in one forward pass; None if not applicable."""

    rotations: Rotations | None = None
    segment_ids: jax.Array | None = None
    """[batch, length] int32."""
    order: Order = "contiguous"
    """Order of the length dim over the mesh axis `context`."""
    start: jax.Array | int = 0
    """With a cache: the first row of the new positions, scalar int32."""


class KeyValues(NamedTuple):
    """Keys and values of one layer: [batch, max_length, kv_heads, head_dim] each."""

    key: jax.Array
    value: jax.Array


class Attention(nnx.Module):
    """Causal self-attention with grouped heads."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed, head = {"embed": config.embed_dim}, {"head_dim": config.head_size}
        heads, kv_heads = {"heads": config.num_heads}, {"kv_heads": config.kv_heads}
        options = {"stddev": config.init_stddev, "bias": config.qkv_bias, "rngs": rngs}
        self.query = Linear(embed, heads | head, **options)
        self.key = Linear(embed, kv_heads | head, **options)
        self.value = Linear(embed, kv_heads | head, **options)
        stddev = residual_stddev(config.init_stddev, config.num_layers)
        self.out = Linear(heads | head, embed, stddev=stddev, bias=config.out_bias, rngs=rngs)

    def __call__(
        self, x: jax.Array, context: Context, cache: KeyValues | None
    ) -> tuple[jax.Array, KeyValues | None]:
        copies = kv_copies(self.config) if cache is None else 1
        query, key, value = self.query(x), self.key(x, copies), self.value(x, copies)
        if context.rotations is not None:
            query, key = rotate(query, context.rotations), rotate(key, context.rotations)
        query = tag(constrain(query, "batch", "length", "heads", "head_dim"), "query")
        key = tag(constrain(key, "batch", "length", "kv_heads", "head_dim"), "key")
        value = tag(constrain(value, "batch", "length", "kv_heads", "head_dim"), "value")
        window = self.config.window
        if cache is None:
            y = attend(
                query,
                key,
                value,
                segment_ids=context.segment_ids,
                window=window,
                backend=self.config.attention,
                context=self.config.context,
                order=context.order,
            )
        else:
            at = (0, context.start, 0, 0)
            cache = KeyValues(
                jax.lax.dynamic_update_slice(cache.key, key, at),
                jax.lax.dynamic_update_slice(cache.value, value, at),
            )
            # Rows beyond the newest position are still empty: they come later, so no query sees
            # them.
            rows = context.start + jnp.arange(x.shape[1])[None]
            y = attend(query, *cache, positions=rows, window=window)
        y = constrain(y, "batch", "length", "heads", "head_dim")
        return self.out(y), cache


class MLP(nnx.Module):
    """A plain or gated MLP. Source of the gated one: Shazeer 2020, "GLU Variants Improve
    Transformer"."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.activation = config.activation
        embed, hidden = {"embed": config.embed_dim}, {"mlp": config.mlp_size}
        options = {"stddev": config.init_stddev, "bias": config.mlp_bias, "rngs": rngs}
        self.gate = Linear(embed, hidden, **options) if config.mlp == "gated" else None
        self.up = Linear(embed, hidden, **options)
        stddev = residual_stddev(config.init_stddev, config.num_layers)
        self.down = Linear(hidden, embed, stddev=stddev, bias=config.mlp_bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.activation]
        up = constrain(self.up(x), "batch", "length", "mlp")
        if self.gate is None:
            hidden = activation(up)
        else:
            hidden = activation(constrain(self.gate(x), "batch", "length", "mlp")) * up
        return self.down(tag(hidden, "mlp_hidden"))


class Block(nnx.Module):
    """A layer: `x + attention(norm(x))`, then `x + mlp(norm(x))`, or experts for the MLP."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        norm = {"kind": config.norm, "eps": config.norm_eps}
        self.attention_norm = Norm(config.embed_dim, **norm)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = Norm(config.embed_dim, **norm)
        self.mlp = MLP(config, rngs=rngs) if config.moe is None else _experts(config, rngs)
        self.attention_dropout = dropout(config.dropout, rngs)
        self.mlp_dropout = dropout(config.dropout, rngs)

    def __call__(
        self, x: jax.Array, context: Context, cache: KeyValues | None = None
    ) -> tuple[jax.Array, RouterStats | None, KeyValues | None]:
        """Returns the residual stream [batch, length, embed], the router statistics, and the cache
        with the new rows."""
        x = tag(x, "layer_in")
        branch = tag(self.attention_norm(x), "attention_in")
        branch, cache = self.attention(whole(branch), context, cache)
        x = x + self.attention_dropout(tag(residual(branch), "attention_out"))
        branch, stats = whole(tag(self.mlp_norm(x), "mlp_in")), None
        if isinstance(self.mlp, MoE):
            mask = None if context.segment_ids is None else context.segment_ids > 0
            branch, stats = self.mlp(branch, mask)
        else:
            branch = self.mlp(branch)
        x = x + self.mlp_dropout(tag(residual(branch), "mlp_out"))
        return residual(x), stats, cache


def _experts(config: TransformerConfig, rngs: nnx.Rngs) -> MoE:
    assert config.moe is not None
    return MoE(
        config.moe,
        config.embed_dim,
        config.mlp_size,
        activation=ACTIVATIONS[config.activation],
        stddev=config.init_stddev,
        out_stddev=residual_stddev(config.init_stddev, config.num_layers),
        rngs=rngs,
    )
