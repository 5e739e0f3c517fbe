"""Convolutions of every kind, pools and norms over images [batch, height, width, channels]."""

import jax
import jax.numpy as jnp
from flax import linen

from random_programs.dense import ACTIVATIONS, norm


class Convolution(linen.Module):
    """A convolution, plain, strided, dilated or in groups, with a norm and an activation."""

    channels: int
    window: int
    stride: int
    groups: int
    norm: str | None
    activation: str
    dilation: int = 1

    @linen.compact
    def __call__(self, x):
        x = linen.Conv(
            self.channels,
            (self.window, self.window),
            strides=self.stride,
            kernel_dilation=self.dilation,
            feature_group_count=self.groups,
        )(x)
        return ACTIVATIONS[self.activation](norm(self.norm)(x) if self.norm else x)


class Separable(linen.Module):
    """A depthwise convolution and a pointwise one, after MobileNet."""

    channels: int
    window: int
    stride: int
    norm: str | None

    @linen.compact
    def __call__(self, x):
        window, groups = (self.window, self.window), x.shape[-1]
        x = linen.Conv(groups, window, strides=self.stride, feature_group_count=groups)(x)
        x = jax.nn.relu(norm(self.norm)(x) if self.norm else x)
        return linen.Conv(self.channels, (1, 1))(x)


class Transposed(linen.Module):
    """A transposed convolution, which doubles height and width."""

    channels: int

    @linen.compact
    def __call__(self, x):
        return jnp.tanh(linen.ConvTranspose(self.channels, (3, 3), strides=(2, 2))(x))


class ResidualConvolutions(linen.Module):
    """Two convolutions added to the input, after ResNet."""

    channels: int
    norm: str

    @linen.compact
    def __call__(self, x):
        y = jax.nn.relu(norm(self.norm)(linen.Conv(self.channels, (3, 3))(x)))
        y = norm(self.norm)(linen.Conv(self.channels, (3, 3))(y))
        if x.shape[-1] != self.channels:
            x = linen.Conv(self.channels, (1, 1), name="project")(x)
        return jax.nn.relu(x + y)


class SqueezeExcite(linen.Module):
    """Channels weighed by what the whole image holds."""

    @linen.compact
    def __call__(self, x):
        channels = x.shape[-1]
        h = jax.nn.silu(linen.Dense(channels // 2)(x.mean((1, 2), keepdims=True)))
        return x * jax.nn.sigmoid(linen.Dense(channels)(h))


class Pool(linen.Module):
    """The largest or the mean of a window."""

    kind: str
    window: int
    stride: int
    padding: str

    @linen.compact
    def __call__(self, x):
        pool = {"max": linen.max_pool, "mean": linen.avg_pool}[self.kind]
        square = (self.window, self.window)
        return pool(x, square, (self.stride, self.stride), padding=self.padding)


class Skip(linen.Module):
    """Down by a strided convolution, up by interpolation, and joined to the input, after U-Net."""

    channels: int

    @linen.compact
    def __call__(self, x):
        y = jax.nn.relu(linen.Conv(self.channels, (3, 3), strides=2)(x))
        y = jax.image.resize(y, (*x.shape[:3], self.channels), "nearest")
        return linen.Conv(self.channels, (3, 3))(jnp.concatenate([x, y], axis=-1))


class Patches(linen.Module):
    """Attention between the pixels of the image."""

    heads: int

    @linen.compact
    def __call__(self, x):
        batch, height, width, channels = x.shape
        y = linen.LayerNorm()(x).reshape(batch, height * width, channels)
        y = linen.MultiHeadDotProductAttention(self.heads)(y)
        return x + y.reshape(x.shape)


NORMS = (None, "batch", "group", "layer")

PIECES = {
    "conv": lambda r: Convolution(
        r.pick(8, 16, 32),
        r.pick(1, 2, 3, 5),
        r.pick(1, 1, 2),
        1,
        r.pick(*NORMS),
        r.pick("relu", "gelu"),
        r.pick(1, 1, 1, 2),
    ),
    "grouped_conv": lambda r: Convolution(
        r.pick(8, 16), 3, r.pick(1, 1, 2), r.pick(2, 4, 8), r.pick(*NORMS), "relu"
    ),
    "depthwise_conv": lambda r: Separable(
        r.pick(8, 16), r.pick(3, 5), r.pick(1, 2), r.pick(*NORMS)
    ),
    "conv_transpose": lambda r: Transposed(r.pick(8, 16)),
    "conv_residual": lambda r: ResidualConvolutions(r.pick(8, 16), r.pick(*NORMS[1:])),
    "squeeze_excite": lambda r: SqueezeExcite(),
    "pool": lambda r: Pool(
        r.pick("max", "max", "mean"), r.pick(2, 3), r.pick(1, 2), r.pick("SAME", "SAME", "VALID")
    ),
    "unet": lambda r: Skip(r.pick(8, 16)),
    "pixel_attention": lambda r: Patches(r.pick(2, 4)),
}
"""A function of each piece that draws it: `draw(random) -> module`."""
