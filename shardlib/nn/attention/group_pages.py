"""The keys and values of one group in pages, and how a step writes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class GroupPages(NamedTuple):
    """Keys and values of a stack of layers: [layers, 1, pages, page_size, heads * head_dim] each;
    on a CPU [layers, 1, pages, heads, page_size, head_dim] each; or both in `key`, as the kernel of
    TPUs reads them, [layers, 1, pages, page_size, 2 * heads, head_dim].

    On GPUs and TPUs a row writes the whole of its last dims, so compilers write in place. With a
    dim of their own, heads would lie in another order in the write than in the read of XLA, and
    each layer would copy the cache. So it would if the dim of the group were removed and added
    again. On a CPU the keys of a head lie together, as a product reads them: there nothing else
    would bring them into this order than a copy of each block.
    """

    key: jax.Array
    value: jax.Array | None
    """None if `key` has the keys and the values of each head in turn."""
    key_scale: jax.Array | None = None
    """The scales of int8 pages: [layers, 1, pages, kv_heads * page_size] float32."""
    value_scale: jax.Array | None = None

    @property
    def in_turn(self) -> bool:
        """Whether `key` has the keys and the values of each head in turn."""
        return self.value is None

    @property
    def by_head(self) -> bool:
        """Whether the keys of a head lie together."""
        return self.key.ndim == 6 and not self.in_turn

    @property
    def page_size(self) -> int:
        return self.key.shape[3 if self.in_turn else -2]

    def num_heads(self, head_dim: int) -> int:
        """Returns the number of heads of keys, whose dim is given, and of values."""
        if self.in_turn:
            return self.key.shape[-2] // 2
        return self.key.shape[3] if self.by_head else self.key.shape[-1] // head_dim

    def value_dim(self, kv_heads: int) -> int:
        """Returns the dims of a head of values."""
        if self.value is None:
            return self.key.shape[-1]
        return self.value.shape[-1] // (1 if self.by_head else kv_heads)

    def written(
        self,
        layer: int | jax.Array,
        positions: jax.Array,
        at_pages: jax.Array,
        key: jax.Array,
        value: jax.Array,
    ) -> "GroupPages":
        """Returns the pages with a key and a value [rows, kv_heads, dims] of each row in one layer,
        at a position [rows] of a page [rows]."""
        at = positions % self.page_size
        if self.value is None:
            both = jnp.stack([key, value], axis=2).reshape(len(key), -1, key.shape[-1])
            both = both.astype(self.key.dtype)
            return self._replace(key=self.key.at[layer, 0, at_pages, at].set(both))
        place = layer, at_pages, at
        keys, key_scale = self._with(self.key, self.key_scale, place, key)
        values, value_scale = self._with(self.value, self.value_scale, place, value)
        return GroupPages(keys, values, key_scale, value_scale)

    def _with(
        self,
        pages: jax.Array,
        scales: jax.Array | None,
        place: tuple[int | jax.Array, jax.Array, jax.Array],
        new: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns pages, and their scales, with a key or a value of each row."""
        layer, at_pages, at = place
        heads = jnp.arange(new.shape[1], dtype=jnp.int32)
        if scales is not None:
            new, factors = _in_int8(new)
            of_heads = heads[None] * self.page_size + at[:, None]
            scales = scales.at[layer, 0, at_pages[:, None], of_heads].set(factors)
        new = new.astype(pages.dtype)
        if self.by_head:
            return pages.at[layer, 0, at_pages[:, None], heads, at[:, None]].set(new), scales
        return pages.at[layer, 0, at_pages, at].set(new.reshape(new.shape[0], -1)), scales

    def read(
        self, layer: int | jax.Array, pages: jax.Array, kv_heads: int, dtype: jax.typing.DTypeLike
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and the values of consecutive pages [n] of a sequence in one layer:
        [kv_heads, n * page_size, dims] each; `dtype` is that of keys and values in 8 bits."""
        if self.value is None:
            found = self.key[layer, 0, pages]
            found = found.reshape(-1, kv_heads, 2, found.shape[-1])
            return jnp.moveaxis(found[:, :, 0], 0, 1), jnp.moveaxis(found[:, :, 1], 0, 1)

        def read(cache: jax.Array, scales: jax.Array | None) -> jax.Array:
            found = cache[layer, 0, pages]
            if self.by_head:
                found = jnp.moveaxis(found, 0, 1).reshape(kv_heads, -1, found.shape[-1])
            else:
                length = len(pages) * self.page_size
                found = jnp.moveaxis(found.reshape(length, kv_heads, -1), 0, 1)
            if scales is None:
                return found
            factors = scales[layer, 0, pages].reshape(len(pages), kv_heads, -1)
            factors = jnp.moveaxis(factors, 0, 1).reshape(kv_heads, -1, 1)
            return (found.astype(jnp.float32) * factors).astype(dtype)

        return read(self.key, self.key_scale), read(self.value, self.value_scale)


def _in_int8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns rows [rows, kv_heads, dims] as int8 from -127 to 127, and scales [rows, kv_heads].

    Source: Dettmers et al. 2022, "LLM.int8()", sec. 2, with a scale for each head of each row.
    """
    x = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scales = jnp.where(largest > 0, largest, 1.0) / 127.0
    return jnp.round(x / scales[..., None]).astype(jnp.int8), scales
