"""The layers of T5: attention with a bias for distances, attention to the encoder, and MLPs.

Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", section 2.1; Shazeer 2020, "GLU Variants Improve Transformer", for the gated MLP.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.nn.attention import attend
from shardlib.nn.remat import tag
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import Linear, Norm, dropout, parameter, residual, whole
from shardlib_models.t5_config import T5Config
from shardlib_models.transformer_attention import Context as Place
from shardlib_models.transformer_attention import KeyValues


class Memory(NamedTuple):
    """What a decoder knows in all its layers."""

    encoded: jax.Array | None
    """The output of the encoder [batch, kv_length, embed]; None if each layer gets its keys and
    values."""
    bias: jax.Array
    """Bias of self-attention [heads, length, kv_length]."""
    segment_ids: jax.Array | None = None
    """[batch, length] int32, the documents of the decoder's positions; None for one."""
    cross_ids: tuple[jax.Array | None, jax.Array | None] = (None, None)
    """The documents of the decoder's and of the encoder's positions; both None for one."""
    start: jax.Array | int = 0
    """With a cache: the first of the new positions, scalar int32."""


class RelativeBias(nnx.Module):
    """A bias of attention for each head and kind of distance."""

    def __init__(self, config: T5Config, *, bidirectional: bool, rngs: nnx.Rngs):
        self.bidirectional = bidirectional
        self.max_distance = config.relative_max_distance
        shape = (config.relative_buckets, config.num_heads)
        stddev = config.init_factor * config.embed_dim**-0.5
        table = stddev * jax.random.normal(rngs.params(), shape)
        self.table = parameter(table, "buckets", "heads")

    def __call__(self, start: jax.Array | int, length: int, kv_length: int) -> jax.Array:
        """Returns the bias [heads, length, kv_length] of queries from position `start` on."""
        positions = start + jnp.arange(length, dtype=jnp.int32)
        distance = jnp.arange(kv_length, dtype=jnp.int32)[None] - positions[:, None]
        table = self.table[...]
        kinds = buckets(
            distance,
            bidirectional=self.bidirectional,
            num_buckets=table.shape[0],
            max_distance=self.max_distance,
        )
        bias = jnp.transpose(table.at[kinds].get(mode="clip"), (2, 0, 1))
        return constrain(bias, "heads", "length", None)


def buckets(
    distance: jax.Array, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> jax.Array:
    """Returns the kind of each distance, int32 in [0, num_buckets).

    Half of the kinds are for one distance each, the others for ranges that grow exponentially up to
    `max_distance`. Keys after the query have kinds of their own if `bidirectional`, else that of
    distance 0.

    Args:
        distance: Position of the key less that of the query, int32 of any shape.
        bidirectional: Whether queries see later keys.
        num_buckets: Number of kinds, a multiple of 4.
        max_distance: The distance from which all are of one kind.

    Source: Raffel et al. 2020, section 2.1.
    """
    if bidirectional:
        later = jnp.where(distance > 0, num_buckets // 2, 0)
        return later + _kind(jnp.abs(distance), num_buckets // 2, max_distance)
    return _kind(jnp.maximum(-distance, 0), num_buckets, max_distance)


def _kind(distance: jax.Array, num_buckets: int, max_distance: int) -> jax.Array:
    # Compared as integers: the logarithms of two platforms may differ at the border of a range.
    limits = jnp.asarray(_limits(num_buckets, max_distance), distance.dtype)
    return jnp.searchsorted(limits, distance, side="right", method="compare_all").astype(jnp.int32)


@functools.cache
def _limits(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Returns the smallest distance of each kind but the first."""
    exact = num_buckets // 2
    far = np.arange(exact, max_distance + 1, dtype=np.float32) / np.float32(exact)
    steps = np.log(far) / np.float32(math.log(max_distance / exact)) * (num_buckets - exact)
    kinds = np.minimum(exact + steps.astype(np.int32), num_buckets - 1)
    firsts = [exact + int(np.argmax(kinds >= kind)) for kind in range(exact, num_buckets)]
    return *range(1, exact), *firsts


class Attention(nnx.Module):
    """Attention whose scores are not scaled: the initial queries are small instead."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        embed, head = {"embed": config.embed_dim}, {"head_dim": config.head_size}
        heads, kv_heads = {"heads": config.num_heads}, {"kv_heads": config.num_heads}
        width, inner = config.embed_dim, config.num_heads * config.head_size
        factor = config.init_factor
        narrow = factor * (width * config.head_size) ** -0.5
        self.query = Linear(embed, heads | head, stddev=narrow, rngs=rngs)
        self.key = Linear(embed, kv_heads | head, stddev=factor * width**-0.5, rngs=rngs)
        self.value = Linear(embed, kv_heads | head, stddev=factor * width**-0.5, rngs=rngs)
        self.out = Linear(heads | head, embed, stddev=factor * inner**-0.5, rngs=rngs)

    def keys(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values [batch, length, kv_heads, head_dim] of `x` [batch, length,
        embed]."""
        axes = ("batch", "length", "kv_heads", "head_dim")
        key, value = constrain(self.key(x), *axes), constrain(self.value(x), *axes)
        return tag(key, "key"), tag(value, "value")

    def __call__(self, x: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        """Returns what attention from `x` adds to the residual stream; `attend` takes the
        options."""
        query = tag(constrain(self.query(x), "batch", "length", "heads", "head_dim"), "query")
        y = attend(query, key, value, scale=1.0, **options)
        return self.out(constrain(y, "batch", "length", "heads", "head_dim"))


class MLP(nnx.Module):
    """A plain MLP with ReLU, or one gated by GELU."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        embed, hidden = {"embed": config.embed_dim}, {"mlp": config.mlp_size}
        inner = {"stddev": config.init_factor * config.embed_dim**-0.5, "rngs": rngs}
        self.gate = Linear(embed, hidden, **inner) if config.mlp == "gated_gelu" else None
        self.up = Linear(embed, hidden, **inner)
        stddev = config.init_factor * config.mlp_size**-0.5
        self.down = Linear(hidden, embed, stddev=stddev, rngs=rngs)
        self.dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(self.up(x), "batch", "length", "mlp")
        if self.gate is None:
            hidden = jax.nn.relu(hidden)
        else:
            gate = constrain(self.gate(x), "batch", "length", "mlp")
            hidden = jax.nn.gelu(gate, approximate=True) * hidden
        return self.down(self.dropout(tag(hidden, "mlp_hidden")))


class EncoderLayer(nnx.Module):
    """A layer of the encoder: attention in both directions and an MLP."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = MLP(config, rngs=rngs)
        self.branch_dropout = dropout(config.dropout, rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns the residual stream [batch, length, embed]."""
        x = tag(x, "layer_in")
        y = whole(self.attention_norm(x))
        options = {"bias": bias, "segment_ids": segment_ids, "causal": False}
        branch = self.attention(y, *self.attention.keys(y), **options)
        x = added(x, branch, "attention_out", self.branch_dropout)
        return added(x, self.mlp(whole(self.mlp_norm(x))), "mlp_out", self.branch_dropout)


class DecoderLayer(nnx.Module):
    """A layer of the decoder: causal attention, attention to the encoder, and an MLP."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.attention_norm = norm_of(config)
        self.attention = Attention(config, rngs=rngs)
        self.cross_norm = norm_of(config)
        self.cross = Attention(config, rngs=rngs)
        self.mlp_norm = norm_of(config)
        self.mlp = MLP(config, rngs=rngs)
        self.branch_dropout = dropout(config.dropout, rngs)

    def __call__(
        self,
        x: jax.Array,
        memory: Memory,
        cross: tuple[jax.Array, jax.Array] | None = None,
        cache: KeyValues | None = None,
        layer: jax.Array | int = 0,
    ) -> tuple[jax.Array, KeyValues | None]:
        """Returns the residual stream [batch, length, embed], and the cache with the new rows.

        Args:
            x: The residual stream.
            memory: What all layers know.
            cross: Keys and values of the encoder's output for this layer; None to compute them.
            cache: Keys and values of earlier positions, of all layers.
            layer: The index of this layer in the cache, scalar int32.
        """
        x = tag(x, "layer_in")
        y = whole(self.attention_norm(x))
        key, value = self.attention.keys(y)
        options: dict[str, Any] = {"bias": memory.bias, "segment_ids": memory.segment_ids}
        if cache is not None:
            place = Place(start=memory.start, layer=layer)
            cache = cache.written(place, key, value)
            key, value = cache.of_layer(layer)
            # Rows beyond the newest position are still empty: they come later, so no query sees
            # them.
            options["positions"] = memory.start + jnp.arange(x.shape[1])[None]
        branch = self.attention(y, key, value, **options)
        x = added(x, branch, "attention_out", self.branch_dropout)
        if cross is None:
            assert memory.encoded is not None
            cross = self.cross.keys(memory.encoded)
        ids, kv_ids = memory.cross_ids
        options = {"segment_ids": ids, "kv_segment_ids": kv_ids, "causal": False}
        branch = self.cross(whole(self.cross_norm(x)), *cross, **options)
        x = added(x, branch, "cross_out", self.branch_dropout)
        return added(x, self.mlp(whole(self.mlp_norm(x))), "mlp_out", self.branch_dropout), cache


def added(x: jax.Array, branch: jax.Array, name: str, drop: nnx.Dropout) -> jax.Array:
    """Returns the residual stream with a branch, which `remat` knows by its name."""
    return residual(x + drop(tag(residual(branch), name)))


def norm_of(config: T5Config) -> Norm:
    """Returns an RMSNorm of the residual stream."""
    return Norm(config.embed_dim, kind="rms", eps=config.norm_eps)
