"""The UNet of Stable Diffusion: it predicts the noise in latents, given a text.

Source: Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models";
Podell et al. 2023, "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis",
for pooled texts and sizes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.errors import ModelError
from shardlib.registry import LATENTS, NUM_SIZES, DataSpec, ModelFamily
from shardlib.sharding.constrain import constrain
from shardlib_models.diffusion_loss import loss
from shardlib_models.layers import Linear
from shardlib_models.sizes import UNET_SIZES
from shardlib_models.unet_config import UNetConfig, validate
from shardlib_models.unet_layers import Block, Conv, GroupNorm, sinusoids, spatial, stddev_of

_NORM_EPS = 1e-5


class Embedder(nnx.Module):
    """Two layers from a condition to the dims of the embedding of the noise level."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        # The hidden dims are `embed`, the ones of both ends are never cut.
        first, last = {"features": inputs}, {"features": outputs}
        hidden, options = {"embed": outputs}, {"bias": True, "rngs": rngs}
        self.up = Linear(first, hidden, stddev=stddev_of(inputs), **options)
        self.down = Linear(hidden, last, stddev=stddev_of(outputs), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, outputs] for `x` [batch, inputs]."""
        hidden = constrain(jax.nn.silu(self.up(x)), "batch", "embed")
        return constrain(self.down(hidden), "batch", "features")


class Level(nnx.Module):
    """The blocks of one resolution on one way, and the step to the next."""

    def __init__(self, blocks: list[Block], resample: Conv | None):
        self.blocks = nnx.List(blocks)
        self.resample = resample


class UNet(nnx.Module):
    """A UNet from noisy latents to their noise, or velocity."""

    def __init__(self, config: UNetConfig, *, rngs: nnx.Rngs):
        assert config.channels is not None, "`make` fills it in"
        self.config = config
        widths, last = config.widths, len(config.widths) - 1
        self.time = Embedder(config.width, config.time_dim, rngs=rngs)
        added = (config.pooled_dim or 0) + NUM_SIZES * config.size_dim
        has_added = config.pooled_dim is not None
        self.added = Embedder(added, config.time_dim, rngs=rngs) if has_added else None
        self.conv_in = Conv(config.channels, widths[0], 3, rngs=rngs)
        skips, self.down = _way_down(config, rngs)
        depth = config.middle_depth
        self.middle = Block(config, widths[last], last, depth, rngs=rngs)
        self.middle_out = Block(config, widths[last], last, 0, rngs=rngs)
        self.up = _way_up(config, skips, rngs)
        self.norm = GroupNorm(widths[0], config.norm_groups, _NORM_EPS)
        options: dict[str, Any] = {"zero": True, "outputs_axis": "channels", "rngs": rngs}
        self.conv_out = Conv(widths[0], config.channels, 3, **options)

    def __call__(
        self,
        latents: jax.Array,
        levels: jax.Array,
        context: jax.Array,
        *,
        pooled: jax.Array | None = None,
        sizes: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the prediction, of the shape and dtype of the latents.

        Args:
            latents: [batch, height, width, channels]; each level but the last halves both sizes.
            levels: [batch] int32, the noise levels, from 0.
            context: [batch, length, context_dim], the embeddings of the tokens of a text.
            pooled: [batch, pooled_dim], an embedding of the whole text, for models that take one.
            sizes: [batch, 6] int32: height and width of the image before it was cropped, the upper
                and left edges of the crop, and the height and width to paint, in pixels.

        Raises:
            ModelError: If arrays have other dims, or conditions are missing or too many.
        """
        _check(self.config, latents, levels, context, pooled, sizes)
        time = self._conditions(latents.dtype, levels, pooled, sizes)
        context = constrain(context, "batch", None, "embed")
        x = self.conv_in(spatial(latents))
        skips = [x]
        for level in self.down:
            for block in level.blocks:
                x = block(x, time, context)
                skips.append(x)
            if level.resample is not None:
                x = level.resample(x)
                skips.append(x)
        x = self.middle_out(self.middle(x, time, context), time, context)
        for level in self.up:
            for block in level.blocks:
                x = block(spatial(jnp.concatenate([x, skips.pop()], axis=-1)), time, context)
            if level.resample is not None:
                x = level.resample(_doubled(x))
        return self.conv_out(jax.nn.silu(self.norm(x)))

    def _conditions(
        self, dtype: Any, levels: jax.Array, pooled: jax.Array | None, sizes: jax.Array | None
    ) -> jax.Array:
        """Returns the embedding of the noise level and the further conditions, [batch, features]"""
        time = self.time(sinusoids(levels, self.config.width).astype(dtype))
        if self.added is None:
            return time
        assert pooled is not None
        assert sizes is not None
        embedded = sinusoids(sizes, self.config.size_dim).reshape(sizes.shape[0], -1)
        added = jnp.concatenate([pooled.astype(dtype), embedded.astype(dtype)], axis=-1)
        return time + self.added(constrain(added, "batch", "features"))


def _way_down(config: UNetConfig, rngs: nnx.Rngs) -> tuple[list[int], nnx.List]:
    """Returns the channels of what the way up reads, and the levels."""
    inputs, skips, levels = config.widths[0], [config.widths[0]], []
    last = len(config.widths) - 1
    for level, (outputs, depth) in enumerate(
        zip(config.widths, config.transformer_depths, strict=True)
    ):
        blocks = []
        for _ in range(config.num_resnets):
            blocks.append(Block(config, inputs, level, depth, rngs=rngs))
            skips.append(outputs)
            inputs = outputs
        resample = Conv(outputs, outputs, 3, 2, rngs=rngs) if level < last else None
        skips += [outputs] if level < last else []
        levels.append(Level(blocks, resample))
    return skips, nnx.List(levels)


def _way_up(config: UNetConfig, skips: list[int], rngs: nnx.Rngs) -> nnx.List:
    """Returns the levels from the last to the first."""
    inputs, left, levels = config.widths[-1], list(skips), []
    for level in reversed(range(len(config.widths))):
        outputs, depth, blocks = config.widths[level], config.transformer_depths[level], []
        for _ in range(config.num_resnets + 1):
            blocks.append(Block(config, inputs + left.pop(), level, depth, rngs=rngs))
            inputs = outputs
        levels.append(Level(blocks, Conv(outputs, outputs, 3, rngs=rngs) if level else None))
    return nnx.List(levels)


def _doubled(x: jax.Array) -> jax.Array:
    """Returns [batch, 2 * height, 2 * width, channels], each pixel four times."""
    rows, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None], (rows, height, 2, width, 2, channels))
    return spatial(x.reshape(rows, 2 * height, 2 * width, channels))


def _check(
    config: UNetConfig,
    latents: jax.Array,
    levels: jax.Array,
    context: jax.Array,
    pooled: jax.Array | None,
    sizes: jax.Array | None,
) -> None:
    """Raises `ModelError` with all faults of the inputs of a UNet."""
    rows, factor, faults = latents.shape[0], 2 ** (len(config.multipliers) - 1), []
    size = latents.shape[1:3]
    if latents.ndim != 4 or latents.shape[3] != config.channels or any(n % factor for n in size):
        faults.append(
            f"latents are {list(latents.shape)}, expected [batch, height, width, "
            f"{config.channels}] with sizes that {factor} divides"
        )
    has_pooled = config.pooled_dim is not None
    expected = {
        "levels": (levels, [rows]),
        "context": (context, [rows, *context.shape[1:2], config.context_dim]),
        "pooled": (pooled, [rows, config.pooled_dim] if has_pooled else None),
        "sizes": (sizes, [rows, NUM_SIZES] if has_pooled else None),
    }
    for name, (array, shape) in expected.items():
        held = None if array is None else list(array.shape)
        if held != shape:
            faults.append(f"{name} is {held}, expected {shape}")
    if faults:
        raise ModelError(
            "the UNet cannot read its inputs:\n  "
            + "\n  ".join(faults)
            + "\n  Give latents, text embeddings and conditions of the sizes of its config."
        )


def make(config: UNetConfig, data: DataSpec, rngs: nnx.Rngs) -> UNet:
    """Returns a new UNet for `data`.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    if faults := validate(config, data):
        raise ModelError("the UNet cannot be made:\n  " + "\n  ".join(faults))
    channels = config.channels or (data.image_shape or (0, 0, 0))[2]
    context_dim = config.context_dim or data.context_dim
    full = dataclasses.replace(config, channels=channels, context_dim=context_dim)
    return UNet(full, rngs=rngs)


FAMILY = ModelFamily(
    config=UNetConfig,
    inputs=LATENTS,
    make=make,
    validate=validate,
    loss=loss,
    architectures={"UNet2DConditionModel": "shardlib_models.hf.unet:UNET"},
    sizes=UNET_SIZES,
)
