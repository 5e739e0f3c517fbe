"""One layer of a transformer: attention and MLP, each added to the residual stream."""

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.nn.moe import Glu, RouterStats, gated
from shardlib.nn.remat import tag
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import Linear, dropout, residual, residual_stddev, whole
from shardlib_models.moe import MoE
from shardlib_models.transformer_attention import (
    Attention,
    Cache,
    Context,
    LatentAttention,
    norm_of,
)
from shardlib_models.transformer_config import TransformerConfig

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
_CLAMPED_AT, _CLAMPED_SLOPE = 7.0, 1.702
"""Source: the reference code published with gpt-oss."""


def clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns the hidden units of gpt-oss: (up + 1) * gate * sigmoid(1.702 * gate) of values within
    7, the gate within 7 from above."""
    gate, up = jnp.minimum(gate, _CLAMPED_AT), jnp.clip(up, -_CLAMPED_AT, _CLAMPED_AT)
    return (up + 1.0) * gate * jax.nn.sigmoid(_CLAMPED_SLOPE * gate)


def glu_of(activation: str) -> Glu:
    """Returns the hidden units of a gated MLP from its two projections."""
    is_clamped = activation == "clamped_swiglu"
    return clamped_swiglu if is_clamped else gated(ACTIVATIONS[activation])


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
        up = constrain(self.up(x), "batch", "length", "mlp")
        if self.gate is None:
            hidden = ACTIVATIONS[self.activation](up)
        else:
            gate = constrain(self.gate(x), "batch", "length", "mlp")
            hidden = glu_of(self.activation)(gate, up)
        return self.down(tag(hidden, "mlp_hidden"))


class Block(nnx.Module):
    """A layer: attention, and an MLP or experts, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.kind = config.block
        self.residual_scale = config.residual_scale
        width = config.embed_dim
        self.attention_norm = norm_of(config, width)
        kind = Attention if config.latent is None else LatentAttention
        self.attention = kind(config, rngs=rngs)
        self.mlp_norm = None if self.kind == "parallel_one_norm" else norm_of(config, width)
        self.mlp = MLP(config, rngs=rngs) if config.moe is None else _experts(config, rngs)
        is_sandwich = self.kind == "sandwich"
        self.attention_out_norm = norm_of(config, width) if is_sandwich else None
        self.mlp_out_norm = norm_of(config, width) if is_sandwich else None
        self.attention_dropout = dropout(config.dropout, rngs)
        self.mlp_dropout = dropout(config.dropout, rngs)

    def __call__(
        self, x: jax.Array, context: Context, cache: Cache | None = None
    ) -> tuple[jax.Array, RouterStats | None, Cache | None]:
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
        self, x: jax.Array, context: Context, cache: Cache | None
    ) -> tuple[jax.Array, RouterStats | None, Cache | None]:
        branch, cache = self._attended(tag(x, "attention_in"), context, cache)
        x = tag(self.attention_norm(x + branch), "mlp_in")
        branch, stats = self._mixed(x, context)
        assert self.mlp_norm is not None
        return residual(self.mlp_norm(x + branch)), stats, cache

    def _normed(self, x: jax.Array) -> jax.Array:
        assert self.mlp_norm is not None
        return tag(self.mlp_norm(x), "mlp_in")

    def _attended(
        self, x: jax.Array, context: Context, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        """Returns what attention adds to the residual stream, and the cache with the new rows."""
        branch, cache = self.attention(whole(x), context, cache)
        branch = branch if self.attention_out_norm is None else self.attention_out_norm(branch)
        return self._scaled(self.attention_dropout(tag(residual(branch), "attention_out"))), cache

    def _mixed(self, x: jax.Array, context: Context) -> tuple[jax.Array, RouterStats | None]:
        """Returns what the MLP or the experts add, and the router statistics."""
        x, stats = whole(x), None
        if isinstance(self.mlp, MoE):
            mask = None if context.segment_ids is None else context.segment_ids > 0
            # The rows of a step of the engine are of many sequences, which take no places from each
            # other.
            dispatch = None if context.rows is None else "dropless"
            branch, stats = self.mlp(x, mask, dispatch)
        else:
            branch = self.mlp(x)
        branch = branch if self.mlp_out_norm is None else self.mlp_out_norm(branch)
        return self._scaled(self.mlp_dropout(tag(residual(branch), "mlp_out"))), stats

    def _scaled(self, branch: jax.Array) -> jax.Array:
        return branch if self.residual_scale == 1.0 else branch * self.residual_scale


def _experts(config: TransformerConfig, rngs: nnx.Rngs) -> MoE:
    assert config.moe is not None
    return MoE(
        config.moe,
        config.embed_dim,
        config.mlp_size,
        glu=glu_of(config.activation),
        bias=config.mlp_bias,
        stddev=config.init_stddev,
        out_stddev=residual_stddev(config.init_stddev, config.num_layers),
        rngs=rngs,
    )
