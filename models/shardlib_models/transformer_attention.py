"""Causal self-attention, with heads of their own or from latent vectors, and its cache."""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.nn.attention import Order, Pages, Rows, attend, attend_pages, rotate
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.rotary import Rotations
from shardlib.nn.remat import tag
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import Linear, Norm, parameter, residual_stddev
from shardlib_models.transformer_config import TransformerConfig
from shardlib_models.transformer_facts import kv_copies


class Context(NamedTuple):
    """Values that all layers share in one forward pass; None if not applicable."""

    rotations: Rotations | None = None
    local_rotations: Rotations | None = None
    """The rotations of layers with a window, if they differ."""
    segment_ids: jax.Array | None = None
    """[batch, length] int32."""
    order: Order = "contiguous"
    """Order of the length dim over the mesh axis `context`."""
    start: jax.Array | int = 0
    """With a cache: the first row of the new positions, scalar int32."""
    max_length: int | None = None
    """With a cache: the positions that a row has."""
    rows: Rows | None = None
    """With pages: where the rows of each group belong, which are its length."""
    is_local: jax.Array | None = None
    """Of one layer: whether it has the window, scalar bool; None if the config says it for all."""
    layer: jax.Array | int = 0
    """Of one layer, with a cache: its index in the cache, scalar int32."""

    def of_layer(self, is_local: jax.Array | None, layer: jax.Array | None) -> "Context":
        """Returns the values of one layer."""
        if layer is not None:
            self = self._replace(layer=layer)
        if is_local is None:
            return self
        rotations = self.rotations
        if self.local_rotations is not None:
            choose = functools.partial(jnp.where, is_local)
            rotations = jax.tree.map(choose, self.local_rotations, self.rotations)
        return self._replace(rotations=rotations, is_local=is_local)


class KeyValues(NamedTuple):
    """Keys and values of a stack of layers: [layers, batch, max_length, kv_heads, head_dim] each.

    The loop over layers carries them, and each layer writes its new rows in place. As inputs and
    outputs of its steps they would be copied whole for each token.
    """

    key: jax.Array
    value: jax.Array

    def written(self, context: "Context", key: jax.Array, value: jax.Array) -> "KeyValues":
        """Returns the cache with the new rows of one layer."""
        at = (context.layer, 0, context.start, 0, 0)
        write = jax.lax.dynamic_update_slice
        return KeyValues(write(self.key, key[None], at), write(self.value, value[None], at))

    def of_layer(self, layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of one layer."""
        take = functools.partial(jax.lax.dynamic_index_in_dim, index=layer, keepdims=False)
        return take(self.key), take(self.value)


Cache: TypeAlias = KeyValues | Pages
"""The keys and values of a stack of layers."""


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
        self.out = out_projection(config, rngs)
        self.sinks = parameter(jnp.zeros(config.num_heads), "heads") if config.sinks else None
        norm = functools.partial(norm_of, config, config.head_size)
        each = config.qk_norm == "heads"
        self.query_norm = norm(heads if each else None) if config.qk_norm else None
        self.key_norm = norm(kv_heads if each else None) if config.qk_norm else None

    def projected(
        self, x: jax.Array, context: Context, copies: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns query, key and value [batch, length, heads, head_dim] of `x` [batch, length,
        embed], with `copies` of each key-value head."""
        query, key, value = self.query(x), self.key(x, copies), self.value(x, copies)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key, copies)
        if context.rotations is not None:
            pairs = {"interleaved": self.config.rotary_interleaved}
            query = rotate(query, context.rotations, **pairs)
            key = rotate(key, context.rotations, **pairs)
        return query, key, value

    def __call__(
        self, x: jax.Array, context: Context, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        copies = kv_copies(self.config) if cache is None else 1
        query, key, value = self.projected(x, context, copies)
        query = tag(constrain(query, "batch", "length", "heads", "head_dim"), "query")
        key = tag(constrain(key, "batch", "length", "kv_heads", "head_dim"), "key")
        value = tag(constrain(value, "batch", "length", "kv_heads", "head_dim"), "value")
        if isinstance(cache, Pages):
            y, cache = self._attended_pages(query, key, value, cache, context)
        else:
            if cache is not None:
                cache = cache.written(context, key, value)
                key, value = cache.of_layer(context.layer)
            y = self._attended(query, key, value, context, in_cache=cache is not None)
        y = constrain(y, "batch", "length", "heads", "head_dim")
        return self.out(y), cache

    def _attended(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        context: Context,
        *,
        in_cache: bool,
    ) -> jax.Array:
        config = self.config
        options: dict[str, Any] = {"scale": config.query_scale, "softcap": config.attention_softcap}
        options["sinks"] = None if self.sinks is None else self.sinks[...]
        if in_cache:
            # Rows beyond the newest position are still empty: they come later, so no query sees
            # them.
            options["positions"] = context.start + jnp.arange(query.shape[1])[None]
        else:
            options |= {"segment_ids": context.segment_ids, "order": context.order}
            options |= {"backend": config.attention, "context": config.context}

        def see(window: int | None, *arrays: jax.Array) -> jax.Array:
            return attend(*arrays, window=window, **options)

        if context.is_local is None:
            return see(config.window, query, key, value)
        # A branch each, so that the kernels know their masks.
        local, whole = functools.partial(see, config.window), functools.partial(see, None)
        return jax.lax.cond(context.is_local, local, whole, query, key, value)

    def _attended_pages(
        self, query: jax.Array, key: jax.Array, value: jax.Array, pages: Pages, context: Context
    ) -> tuple[jax.Array, Pages]:
        """Returns attention [groups, rows, heads, value_dim] of rows to their sequences in pages,
        and the pages with the keys and values of the rows."""
        config = self.config
        assert context.rows is not None
        mask = Mask(scale=config.query_scale, softcap=config.attention_softcap)
        sinks = None if self.sinks is None else self.sinks[...]
        return attend_pages(
            query,
            key,
            value,
            pages,
            context.layer,
            context.rows,
            mask,
            window=config.window,
            is_local=context.is_local,
            sinks=sinks,
        )


class LatentAttention(Attention):
    """Causal self-attention whose queries, keys and values come from vectors of few dims.

    Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        latent = config.latent
        assert latent is not None
        embed, heads = {"embed": config.embed_dim}, {"heads": config.num_heads}
        head = {"head_dim": config.head_size}
        options = {"stddev": config.init_stddev, "rngs": rngs}
        rank = latent.query_rank
        self.query_down = None if rank is None else Linear(embed, {"latent": rank}, **options)
        self.query_norm = None if rank is None else norm_of(config, rank)
        self.query = Linear(embed if rank is None else {"latent": rank}, heads | head, **options)
        kv_dims = {"latent": latent.kv_rank + latent.rotary_dims}
        self.kv_down = Linear(embed, kv_dims, **options)
        self.kv_norm = norm_of(config, latent.kv_rank)
        head = {"head_dim": latent.plain_dims + latent.value_dim}
        self.kv_up = Linear({"latent": latent.kv_rank}, heads | head, **options)
        self.out = out_projection(config, rngs)
        self.sinks = None

    def projected(
        self, x: jax.Array, context: Context, copies: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns query and key [batch, length, heads, head_dim], and value [batch, length, heads,
        value_dim], of `x` [batch, length, embed]."""
        del copies
        latent = self.config.latent
        assert latent is not None
        assert context.rotations is not None
        turn = functools.partial(
            rotate, rotations=context.rotations, interleaved=self.config.rotary_interleaved
        )
        if self.query_down is not None and self.query_norm is not None:
            query = self.query(self.query_norm(self.query_down(x)))
        else:
            query = self.query(x)
        plain, turned = jnp.split(query, [latent.plain_dims], axis=-1)
        query = jnp.concatenate([plain, turn(turned)], axis=-1)
        low, turned = jnp.split(self.kv_down(x), [latent.kv_rank], axis=-1)
        pairs = self.kv_up(self.kv_norm(low))
        plain, value = jnp.split(pairs, [latent.plain_dims], axis=-1)
        # One key with positions for all heads.
        shape = (*plain.shape[:-1], latent.rotary_dims)
        turned = jnp.broadcast_to(turn(turned[:, :, None]), shape)
        return query, jnp.concatenate([plain, turned], axis=-1), value


def out_projection(config: TransformerConfig, rngs: nnx.Rngs) -> Linear:
    """Returns the projection from the heads to the residual stream."""
    heads, embed = {"heads": config.num_heads, "head_dim": config.value_size}, config.embed_dim
    stddev = residual_stddev(config.init_stddev, config.num_layers)
    return Linear(heads, {"embed": embed}, stddev=stddev, bias=config.out_bias, rngs=rngs)


def norm_of(config: TransformerConfig, size: int, heads: dict[str, int] | None = None) -> Norm:
    """Returns a norm as the config says, with a scale for each of `heads`."""
    options = {"kind": config.norm, "eps": config.norm_eps, "offset": config.norm_offset}
    return Norm(size, heads=heads, **options)
