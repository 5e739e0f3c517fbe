"""Pieces that mix a sequence: attention, recurrence, windows, [batch, length, features] to the
same features."""

import functools

import jax
import jax.numpy as jnp
from flax import linen
from jax import lax


class Attention(linen.Module):
    """Flax's own multi-head attention."""

    heads: int
    causal: bool
    dropout: float

    @linen.compact
    def __call__(self, x):
        mask = linen.make_causal_mask(x[..., 0]) if self.causal else None
        attend = linen.MultiHeadDotProductAttention(
            self.heads, dropout_rate=self.dropout, deterministic=False
        )
        return x + attend(linen.LayerNorm()(x), mask=mask)


class GroupedAttention(linen.Module):
    """Causal attention with fewer key-value heads than heads, from one merged projection."""

    heads: int
    kv_heads: int
    head_dim: int

    @linen.compact
    def __call__(self, x):
        batch, length, width = x.shape
        groups = self.heads // self.kv_heads
        merged = linen.Dense((self.heads + 2 * self.kv_heads) * self.head_dim, name="qkv")(x)
        split = merged.reshape(batch, length, -1, self.head_dim)
        q, k, v = jnp.split(split, (self.heads, self.heads + self.kv_heads), axis=2)
        k, v = (jnp.repeat(y, groups, axis=2) for y in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / self.head_dim**0.5
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), scores.shape)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, -1)
        return x + linen.Dense(width, name="out")(mixed)


class FusedAttention(linen.Module):
    """`jax.nn.dot_product_attention` over projections with heads of their own."""

    heads: int

    @linen.compact
    def __call__(self, x):
        shape = (self.heads, 8)
        q, k, v = (linen.DenseGeneral(shape, name=name)(x) for name in ("q", "k", "v"))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return x + linen.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)


class Recurrent(linen.Module):
    """A recurrent cell over the length, in one direction or both."""

    cell: str
    hidden: int
    both_ways: bool

    @linen.compact
    def __call__(self, x):
        def layer():
            return linen.RNN(getattr(linen, self.cell)(self.hidden))

        if self.both_ways:
            return linen.Dense(x.shape[-1])(linen.Bidirectional(layer(), layer())(x))
        return linen.Dense(x.shape[-1])(layer()(x))


class StateSpace(linen.Module):
    """A gated linear recurrence as an associative scan, after a short depthwise convolution."""

    hidden: int
    reverse: bool

    @linen.compact
    def __call__(self, x):
        u = linen.Dense(self.hidden)(x)
        u = linen.Conv(self.hidden, (4,), padding="CAUSAL", feature_group_count=self.hidden)(u)
        decay = jax.nn.sigmoid(linen.Dense(self.hidden)(x))

        def step(a, b):
            return a[0] * b[0], b[0] * a[1] + b[1]

        _, h = lax.associative_scan(step, (decay, jax.nn.silu(u)), axis=1, reverse=self.reverse)
        return x + linen.Dense(x.shape[-1])(h)


class Convolved(linen.Module):
    """A convolution along the length, in groups or not."""

    window: int
    groups: int

    @linen.compact
    def __call__(self, x):
        conv = linen.Conv(x.shape[-1], (self.window,), feature_group_count=self.groups)
        return x + jnp.tanh(conv(x))


class Filtered(linen.Module):
    """Every feature convolved with a filter of its own by `jnp.convolve`."""

    window: int

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.normal(0.5)
        # A longer filter would make longer rows.
        filters = self.param("filters", init, (x.shape[-1], min(self.window, x.shape[1])))
        rows = jnp.swapaxes(x, 1, 2)
        one = functools.partial(jnp.convolve, mode="same")
        return x + jnp.swapaxes(jax.vmap(jax.vmap(one), (0, None))(rows, filters), 1, 2)


class Spectral(linen.Module):
    """Mixing by a Fourier transform, after FNet."""

    @linen.compact
    def __call__(self, x):
        mixed = jnp.fft.fft(jnp.fft.fft(x, axis=-1), axis=-2).real
        return linen.LayerNorm()(x + mixed / 8)


class Mixer(linen.Module):
    """A dense layer along the length, after MLP-Mixer."""

    hidden: int

    @linen.compact
    def __call__(self, x):
        length = x.shape[1]
        h = linen.Dense(self.hidden)(jnp.swapaxes(linen.LayerNorm()(x), 1, 2))
        return x + jnp.swapaxes(linen.Dense(length)(linen.gelu(h)), 1, 2)


class Pooled(linen.Module):
    """The largest or the mean of a window that slides along the length."""

    kind: str
    window: int
    stride: int

    @linen.compact
    def __call__(self, x):
        pool = {"max": linen.max_pool, "mean": linen.avg_pool}[self.kind]
        return linen.Dense(x.shape[-1])(pool(x, (self.window,), (self.stride,), padding="SAME"))


class Offsets(linen.Module):
    """A window of a table of positions; its start may lie so late that it must be clamped."""

    late: bool

    @linen.compact
    def __call__(self, x):
        length, width = x.shape[1:]
        table = self.param("table", linen.initializers.normal(1.0), (2 * length, width))
        start = jnp.argmax(jnp.mean(x, (0, 1))).astype(jnp.int32) + (length if self.late else 0)
        window = lax.dynamic_slice(table, (start, jnp.int32(0)), (length, width))
        return x + jnp.broadcast_to(window, x.shape)


class Cropped(linen.Module):
    """The rows of a sequence from a computed position on."""

    @linen.compact
    def __call__(self, x):
        length = x.shape[1]
        start = jnp.argmax(jnp.mean(x, (0, 2))).astype(jnp.int32)
        return jnp.tanh(lax.dynamic_slice_in_dim(x, start, length // 2, axis=1))


class Summed(linen.Module):
    """The mean of what came before, as a running sum along the length."""

    @linen.compact
    def __call__(self, x):
        count = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return x + linen.Dense(x.shape[-1])(jnp.cumsum(x, axis=1) / count)


class Shifted(linen.Module):
    """Each token mixed with its predecessor, after RWKV."""

    @linen.compact
    def __call__(self, x):
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        share = self.param("share", linen.initializers.uniform(1.0), (1, 1, x.shape[-1]))
        return x + jnp.square(
            jax.nn.relu(linen.Dense(x.shape[-1])(x * share + before * (1 - share)))
        )


class TopTokens(linen.Module):
    """The tokens with the highest scores, gathered in that order."""

    @linen.compact
    def __call__(self, x):
        scores = linen.Dense(1)(x)[..., 0]
        values, indices = lax.top_k(scores, x.shape[1] // 2)
        chosen = jnp.take_along_axis(x, indices[..., None], axis=1)
        return jnp.tanh(linen.Dense(x.shape[-1])(chosen)) * values[..., None]


PIECES = {
    "attention": lambda r: Attention(r.pick(2, 4, 8), r.pick(True, False), r.pick(0.0, 0.1)),
    "gqa": lambda r: GroupedAttention(4, r.pick(1, 2, 4), r.pick(4, 8)),
    "fused_attention": lambda r: FusedAttention(r.pick(2, 4)),
    "recurrent": lambda r: Recurrent(
        r.pick("LSTMCell", "OptimizedLSTMCell", "GRUCell", "MGUCell"), r.pick(16, 32), r.chance(0.3)
    ),
    "state_space": lambda r: StateSpace(r.pick(16, 32), r.chance(0.3)),
    "conv1d": lambda r: Convolved(r.pick(2, 3, 4), r.pick(1, 2, 4, 16)),
    "convolve": lambda r: Filtered(r.pick(2, 4)),
    "fft": lambda r: Spectral(),
    "mixer": lambda r: Mixer(r.pick(16, 32)),
    "pool1d": lambda r: Pooled(r.pick("max", "max", "mean"), r.pick(2, 3), r.pick(1, 1, 2)),
    "dynamic_slice": lambda r: Offsets(r.chance(0.7)),
    "crop": lambda r: Cropped(),
    "cumsum_tokens": lambda r: Summed(),
    "shift": lambda r: Shifted(),
    "top_tokens": lambda r: TopTokens(),
}
"""A function of each piece that draws it: `draw(random) -> module`."""
