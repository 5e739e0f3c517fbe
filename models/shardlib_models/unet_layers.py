"""The blocks of the UNet of Stable Diffusion: convolutions, group norms and transformer layers.

Source: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models",
appendices B and E.2.1.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.nn import remat
from shardlib.nn.attention import Backend, attend
from shardlib.nn.remat import tag
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.sharding.constrain import constrain
from shardlib_models.layers import Linear, Norm, parameter, residual, whole
from shardlib_models.unet_config import TAGS, UNetConfig

_RESNET_EPS, _TRANSFORMER_EPS, _LAYER_EPS = 1e-5, 1e-6, 1e-5
"""Values added to the variance, from the code that the paper publishes."""
_MLP_FACTOR = 4
_LONGEST_PERIOD = 10_000


def spatial(x: jax.Array) -> jax.Array:
    """Places features [batch, height, width, channels]."""
    return constrain(x, "batch", "height", "width", "channels")


def stddev_of(fan_in: int) -> float:
    """Returns the standard deviation of initial weights, that of U(-1/sqrt(n), 1/sqrt(n)) for `n`
    inputs.

    Source: LeCun et al. 1998, "Efficient BackProp", section 4.6, as PyTorch's layers apply it.
    """
    return 1.0 / math.sqrt(3 * fan_in)


def sinusoids(positions: jax.Array, size: int) -> jax.Array:
    """Returns cosines, then sines, of positions at geometric frequencies: [..., size] float32.

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5; Ho et al. 2020,
    "Denoising Diffusion Probabilistic Models", section 4.
    """
    half = size // 2
    powers = jnp.arange(half, dtype=jnp.float32) * (-math.log(_LONGEST_PERIOD) / half)
    angles = positions.astype(jnp.float32)[..., None] * jnp.exp(powers).reshape(
        (1,) * positions.ndim + (half,)
    )
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class Conv(nnx.Module):
    """A convolution with a bias, padded to keep the size at stride 1."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int = 1,
        *,
        zero: bool = False,
        outputs_axis: str = "conv_out",
        rngs: nnx.Rngs,
    ):
        """Args: the channels of inputs and outputs, the size of the kernel, and whether it is 0 at
        the start, as the last one of a branch is."""
        self.stride = stride
        shape, stddev = (size, size, inputs, outputs), stddev_of(size * size * inputs)
        kernel = jnp.zeros(shape) if zero else stddev * jax.random.normal(rngs.params(), shape)
        self.kernel = parameter(kernel, "kernel_h", "kernel_w", "conv_in", outputs_axis)
        self.bias = parameter(jnp.zeros(outputs), "channels")

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, height / stride, width / stride, outputs]."""
        kernel = self.kernel[...]
        pad = kernel.shape[0] // 2
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding=((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return spatial(tag(y, "conv") + self.bias[...][None, None, None])


class GroupNorm(nnx.GroupNorm):
    """A norm over height, width and a group of channels, computed in float32.

    Source: Wu & He 2018, "Group Normalization".
    """

    def __init__(self, channels: int, groups: int, eps: float):
        metadata = {"out_sharding": ("norm",), "eager_sharding": False}
        super().__init__(
            channels,
            num_groups=groups,
            epsilon=eps,
            dtype=jnp.float32,
            use_fast_variance=False,
            scale_metadata=metadata,
            bias_metadata=metadata,
            rngs=nnx.Rngs(0),  # Its parameters are ones and zeros.
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalised features, of the shape and dtype of `x`."""
        return spatial(super().__call__(x).astype(x.dtype))


class Resnet(nnx.Module):
    """A residual block of two convolutions, to which the noise level adds a vector."""

    def __init__(self, config: UNetConfig, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.norm_1 = GroupNorm(inputs, config.norm_groups, _RESNET_EPS)
        self.conv_1 = Conv(inputs, outputs, 3, rngs=rngs)
        features = {"features": config.time_dim}
        stddev = stddev_of(config.time_dim)
        self.time = Linear(features, {"embed": outputs}, stddev=stddev, bias=True, rngs=rngs)
        self.norm_2 = GroupNorm(outputs, config.norm_groups, _RESNET_EPS)
        self.conv_2 = Conv(outputs, outputs, 3, zero=True, rngs=rngs)
        self.shortcut = Conv(inputs, outputs, 1, rngs=rngs) if inputs != outputs else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """Returns [batch, height, width, outputs] for `time` [batch, features]."""
        y = self.conv_1(jax.nn.silu(self.norm_1(x)))
        shift = constrain(self.time(jax.nn.silu(time)), "batch", "embed")
        y = self.conv_2(jax.nn.silu(self.norm_2(y + shift[:, None, None])))
        return spatial((x if self.shortcut is None else self.shortcut(x)) + y)


class Attention(nnx.Module):
    """Attention of positions to each other, or to the tokens of a text."""

    def __init__(
        self,
        config: UNetConfig,
        width: int,
        heads: int,
        *,
        context_dim: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.backend: Backend = config.attention
        embed, head = {"embed": width}, {"head_dim": width // heads}
        source = {"embed": context_dim or width}
        kv: dict[str, Any] = {"stddev": stddev_of(context_dim or width), "rngs": rngs}
        self.query = Linear(embed, {"heads": heads} | head, stddev=stddev_of(width), rngs=rngs)
        self.key = Linear(source, {"kv_heads": heads} | head, **kv)
        self.value = Linear(source, {"kv_heads": heads} | head, **kv)
        options: dict[str, Any] = {"stddev": stddev_of(width), "bias": True, "rngs": rngs}
        self.out = Linear({"heads": heads} | head, embed, **options)

    def __call__(self, x: jax.Array, context: jax.Array | None = None) -> jax.Array:
        """Returns what attention from `x` [batch, length, embed] adds to the residual stream."""
        source, length = (x, "length") if context is None else (context, None)
        query = constrain(self.query(x), "batch", "length", "heads", "head_dim")
        key, value = (
            constrain(project(source), "batch", length, "kv_heads", "head_dim")
            for project in (self.key, self.value)
        )
        y = attend(
            tag(query, "query"),
            tag(key, "key"),
            tag(value, "value"),
            causal=False,
            backend=self.backend,
        )
        return self.out(constrain(y, "batch", "length", "heads", "head_dim"))


class GatedMLP(nnx.Module):
    """An MLP whose hidden units are gated by GELU.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        embed, hidden = {"embed": width}, {"mlp": _MLP_FACTOR * width}
        options: dict[str, Any] = {"bias": True, "rngs": rngs}
        self.up = Linear(embed, hidden, stddev=stddev_of(width), **options)
        self.gate = Linear(embed, hidden, stddev=stddev_of(width), **options)
        self.down = Linear(hidden, embed, stddev=stddev_of(_MLP_FACTOR * width), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        up, gate = (constrain(y, "batch", "length", "mlp") for y in (self.up(x), self.gate(x)))
        return self.down(tag(up * jax.nn.gelu(gate, approximate=False), "mlp_hidden"))


class Layer(nnx.Module):
    """A transformer layer: self-attention, attention to the text, and an MLP."""

    def __init__(self, config: UNetConfig, width: int, heads: int, *, rngs: nnx.Rngs):
        assert config.context_dim is not None, "`make` fills it in"
        self.attention_norm = Norm(width, kind="layer", eps=_LAYER_EPS)
        self.attention = Attention(config, width, heads, rngs=rngs)
        self.cross_norm = Norm(width, kind="layer", eps=_LAYER_EPS)
        self.cross = Attention(config, width, heads, context_dim=config.context_dim, rngs=rngs)
        self.mlp_norm = Norm(width, kind="layer", eps=_LAYER_EPS)
        self.mlp = GatedMLP(width, rngs=rngs)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """Returns the residual stream [batch, length, embed]."""
        x = tag(x, "layer_in")
        x = _added(x, self.attention(whole(self.attention_norm(x))), "attention_out")
        x = _added(x, self.cross(whole(self.cross_norm(x)), context), "cross_out")
        return _added(x, self.mlp(whole(self.mlp_norm(x))), "mlp_out")


def _added(x: jax.Array, branch: jax.Array, name: str) -> jax.Array:
    return residual(x + tag(residual(branch), name))


class Entry(nnx.Module):
    """Features as a sequence of positions."""

    def __init__(self, config: UNetConfig, width: int, *, rngs: nnx.Rngs):
        self.norm = GroupNorm(width, config.norm_groups, _TRANSFORMER_EPS)
        options: dict[str, Any] = {"stddev": stddev_of(width), "bias": True, "rngs": rngs}
        self.projection = Linear({"channels": width}, {"embed": width}, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, height * width, embed]."""
        rows, height, width, channels = x.shape
        return self.projection(residual(self.norm(x).reshape(rows, height * width, channels)))


class SpatialTransformer(nnx.Module):
    """Transformer layers over all positions of an image, added to their input."""

    def __init__(self, config: UNetConfig, width: int, heads: int, depth: int, *, rngs: nnx.Rngs):
        self.remat = config.remat
        self.entry = Entry(config, width, rngs=rngs)
        self.layers = stack_layers(
            lambda rngs: Layer(config, width, heads, rngs=rngs),
            depth,
            rngs,
            axis_name="block_layers",
        )
        options: dict[str, Any] = {"stddev": 0.0, "bias": True, "rngs": rngs}
        self.exit = Linear({"embed": width}, {"channels": width}, **options)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        """Returns [batch, height, width, channels]."""

        def call(layer: Layer, y: jax.Array, _: Any) -> tuple[jax.Array, None]:
            return layer(y, context), None

        y = residual(rematerialized(self.remat, self.entry, x))
        options: dict[str, Any] = {"remat": self.remat, "tags": TAGS, "staged": False}
        y, _ = scan_layers(call, self.layers, y, **options)
        return spatial(x + self.exit(whole(y)).reshape(x.shape))


class Block(nnx.Module):
    """A residual block and, where the level has one, a transformer."""

    def __init__(
        self,
        config: UNetConfig,
        inputs: int,
        level: int,
        depth: int,
        *,
        rngs: nnx.Rngs,
    ):
        outputs = config.widths[level]
        self.remat = config.remat
        self.resnet = Resnet(config, inputs, outputs, rngs=rngs)
        heads = config.heads(level)
        self.transformer = (
            SpatialTransformer(config, outputs, heads, depth, rngs=rngs) if depth else None
        )

    def __call__(self, x: jax.Array, time: jax.Array, context: jax.Array) -> jax.Array:
        """Returns [batch, height, width, channels]."""
        x = rematerialized(self.remat, self.resnet, x, time)
        return x if self.transformer is None else self.transformer(x, context)


def rematerialized(policy: str, module: nnx.Module, *inputs: jax.Array) -> jax.Array:
    """Returns what a module without state gives, computed under a policy of `shardlib.nn.remat`."""
    graphdef, state = nnx.split(module)

    def call(state: Any, *inputs: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(*inputs)

    return remat.apply(policy, call, tags=TAGS)(state, *inputs)
