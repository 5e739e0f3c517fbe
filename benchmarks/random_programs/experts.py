"""Experts to which a router sends rows: by capacity, by sorting, by scattering; [batch, length,
features] to the same."""

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax


class Capacity(linen.Module):
    """Each expert takes the first rows that ask for it, as many as it has places."""

    experts: int
    top: int
    places: int

    @linen.compact
    def __call__(self, x):
        width = x.shape[-1]
        gates = linen.softmax(linen.Dense(self.experts, name="router")(x))
        chosen = jax.nn.one_hot(lax.top_k(gates, self.top)[1], self.experts).sum(2)
        position = jnp.cumsum(chosen, axis=1) * chosen - 1
        fits = (position < self.places).astype(x.dtype) * chosen
        slots = jax.nn.one_hot(position.astype(jnp.int32), self.places) * fits[..., None]
        init = linen.initializers.lecun_normal()
        up = self.param("up", init, (self.experts, width, 2 * width))
        down = self.param("down", init, (self.experts, 2 * width, width))
        y = jnp.einsum("btec,btd->becd", slots, x)
        y = jnp.einsum("bech,ehd->becd", linen.gelu(jnp.einsum("becd,edh->bech", y, up)), down)
        return x + jnp.einsum("btec,becd->btd", slots * gates[..., None], y)


class Ragged(linen.Module):
    """Rows sorted by their expert, multiplied group by group, and put back."""

    experts: int

    @linen.compact
    def __call__(self, x):
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        gates = linen.softmax(linen.Dense(self.experts, name="router")(rows))
        expert = jnp.argmax(gates, -1)
        order = jnp.argsort(expert)
        init = linen.initializers.lecun_normal()
        kernel = self.param("kernel", init, (self.experts, width, width))
        sizes = jnp.bincount(expert, length=self.experts).astype(jnp.int32)
        y = jnp.tanh(lax.ragged_dot(rows[order], kernel, sizes))
        y = jnp.zeros_like(y).at[order].set(y)
        return x + (y * jnp.take_along_axis(gates, expert[:, None], axis=1)).reshape(x.shape)


class Scattered(linen.Module):
    """Rows scattered into a buffer of each expert by a count over the whole batch."""

    experts: int

    @linen.compact
    def __call__(self, x):
        width = x.shape[-1]
        rows = x.reshape(-1, width)
        places = rows.shape[0] // 2
        logits = linen.Dense(self.experts, name="router")(rows)
        expert = jnp.argmax(logits, -1)
        counts = jnp.cumsum(jax.nn.one_hot(expert, self.experts, dtype=jnp.int32), axis=0)
        place = jnp.take_along_axis(counts, expert[:, None], axis=1)[:, 0] - 1
        init = linen.initializers.lecun_normal()
        kernel = self.param("kernel", init, (self.experts, width, width))
        buffer = jnp.zeros((self.experts, places, width), x.dtype)
        buffer = buffer.at[expert, place].set(rows, mode="drop")
        y = jnp.einsum("ecd,edh->ech", buffer, kernel)
        y = y.at[expert, place].get(mode="fill", fill_value=0)
        gate = jnp.take_along_axis(linen.softmax(logits), expert[:, None], axis=1)
        return x + (y * gate).reshape(x.shape)


PIECES = {
    "capacity_experts": lambda r: Capacity(r.pick(4, 8), r.pick(1, 2), r.pick(2, 4)),
    "sorted_experts": lambda r: Ragged(r.pick(4, 8)),
    "scattered_experts": lambda r: Scattered(r.pick(4, 8)),
}
"""A function of each piece that draws it: `draw(random) -> module`."""
