"""One layer of a transformer: attention and MLP, each added to the residual stream."""

import math
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
        self.query_norm = norm_of(config, config.head_size) if config.qk_norm else None
        self.key_norm = norm_of(config, config.head_size) if config.qk_norm else None

    def __call__(
        self, x: jax.Array, context: Context, cache: KeyValues | None
    ) -> tuple[jax.Array, KeyValues | None]:
        copies = kv_copies(self.config) if cache is None else 1
        query, key, value = self.query(x), self.key(x, copies), self.value(x, copies)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotations is not None:
            pairs = {"interleaved": self.config.rotary_interleaved}
            query = rotate(query, context.rotations, **pairs)
            key = rotate(key, context.rotations, **pairs)
        if self.config.query_scale is not None:
            # `attend` divides by the square root.
            query = query * (self.config.query_scale * math.sqrt(self.config.head_size))
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
    """A layer: attention, and an MLP or experts, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.kind = config.block
        width = config.embed_dim
        self.attention_norm = norm_of(config, width)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = None if self.kind == "parallel_one_norm" else norm_of(config, width)
        self.mlp = MLP(config, rngs=rngs) if config.moe is None else _experts(config, rngs)
        is_sandwich = self.kind == "sandwich"
        self.attention_out_norm = norm_of(config, width) if is_sandwich else None
        self.mlp_out_norm = norm_of(config, width) if is_sandwich else None
        self.attention_dropout = dropout(config.dropout, rngs)
        self.mlp_dropout = dropout(config.dropout, rngs)

    def __call__(
        self, x: jax.Array, context: Context, cache: KeyValues | None = None
    ) -> tuple[jax.Array, RouterStats | None, KeyValues | None]:
        """Returns the residual stream [batch, length, embed], the router statistics, and the cache
        with the new rows."""
        x = tag(x, "layer_in")
        if self.kind == "post":
            return self._post(x, context, cache)
        entered = tag(self.attention_norm(x), "attention_in")
        attended, cache = self._attended(entered, context, cache)
        if self.kind == "parallel_one_norm":
            branch, stats = self._mixed(entered, context)
        elif self.kind == "parallel":
            branch, stats = self._mixed(self._normed(x), context)
        else:
            x, attended = x + attended, None
            branch, stats = self._mixed(self._normed(x), context)
        x = x + branch if attended is None else x + attended + branch
        return residual(x), stats, cache

    def _post(
        self, x: jax.Array, context: Context, cache: KeyValues | None
    ) -> tuple[jax.Array, RouterStats | None, KeyValues | None]:
        branch, cache = self._attended(tag(x, "attention_in"), context, cache)
        x = tag(self.attention_norm(x + branch), "mlp_in")
        branch, stats = self._mixed(x, context)
        assert self.mlp_norm is not None
        return residual(self.mlp_norm(x + branch)), stats, cache

    def _normed(self, x: jax.Array) -> jax.Array:
        assert self.mlp_norm is not None
        return tag(self.mlp_norm(x), "mlp_in")

    def _attended(
        self, x: jax.Array, context: Context, cache: KeyValues | None
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns what attention adds to the residual stream, and the cache with the new rows."""
        branch, cache = self.attention(whole(x), context, cache)
        branch = branch if self.attention_out_norm is None else self.attention_out_norm(branch)
        return self.attention_dropout(tag(residual(branch), "attention_out")), cache

    def _mixed(self, x: jax.Array, context: Context) -> tuple[jax.Array, RouterStats | None]:
        """Returns what the MLP or the experts add, and the router statistics."""
        x, stats = whole(x), None
        if isinstance(self.mlp, MoE):
            mask = None if context.segment_ids is None else context.segment_ids > 0
            branch, stats = self.mlp(x, mask)
        else:
            branch = self.mlp(x)
        branch = branch if self.mlp_out_norm is None else self.mlp_out_norm(branch)
        return self.mlp_dropout(tag(residual(branch), "mlp_out")), stats


def norm_of(config: TransformerConfig, size: int) -> Norm:
    """Returns a norm as the config says."""
    return Norm(size, kind=config.norm, eps=config.norm_eps, offset=config.norm_offset)


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
