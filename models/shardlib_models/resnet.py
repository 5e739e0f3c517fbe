"""ResNet with batch statistics over the whole batch (or microbatch), whatever the mesh.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition" (table 1 for the depths), in
the version often called 1.5: a bottleneck strides in its 3x3 convolution, not in the 1x1 before it.
Initialisation is as in Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 5.1: He et al.
2015 for convolutions, 0 for the last scale of each residual branch, and a standard deviation of
0.01 for the classifier.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.config import configclass
from shardlib.errors import ModelError
from shardlib.registry import IMAGES, DataSpec, ModelFamily
from shardlib.sharding.constrain import constrain
from shardlib_models.data_sizes import faults_of_size
from shardlib_models.image_loss import loss
from shardlib_models.layers import Linear, parameter

Depth = Literal[18, 34, 50, 101, 152]
# Blocks in each of the four stages.
DEPTHS: dict[Depth, tuple[int, ...]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
BOTTLENECK_FROM = 50
EXPANSION = 4

_he_normal = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


@configclass
class ResNetConfig:
    """A residual convolutional network for classification."""

    name: Literal["resnet"] = "resnet"
    depth: Depth = 50
    """Number of weight layers: basic blocks for 18 and 34, bottlenecks for the others."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """A 7x7 convolution of stride 2 and a pool, or a 3x3 of stride 1 for images of 8 to 64."""
    width: int = 64
    """Channels of the first stage; each further stage has twice as many."""
    num_classes: int | None = None
    """Number of logits; null for the number of classes of the data."""
    channels: int | None = None
    """Channels of an image; null for the images of the data."""
    bn_momentum: float = 0.9
    """Weight of the past in the running batch statistics."""
    bn_eps: float = 1e-5
    """Value added to the variance in batch normalisation."""
    init_from: str | None = None
    """A folder in the format of Hugging Face, or its name on the hub, whose weights the run starts
    from; its config.json gives the fields that are left out."""

    @property
    def expansion(self) -> int:
        """The output channels of a block for each inner channel."""
        return EXPANSION if self.depth >= BOTTLENECK_FROM else 1

    @property
    def widths(self) -> list[int]:
        """The channels that each stage gives."""
        stages = range(len(DEPTHS[self.depth]))
        return [self.width * 2**stage * self.expansion for stage in stages]

    def classes(self, data: DataSpec) -> int:
        """Returns the number of logits, from the config or else from the data."""
        size = self.num_classes or data.num_classes
        assert size is not None, "validate() refuses a model without classes"
        return size


class ConvNorm(nnx.Module):
    """A convolution without bias, padded to keep the size at stride 1, and batch normalisation.

    The convolution runs in the dtype of its input, the normalisation in float32. Training uses the
    mean and variance of the global batch, or of a microbatch; evaluation uses the running ones.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int = 1,
        *,
        config: ResNetConfig,
        zero_scale: bool = False,
        rngs: nnx.Rngs,
    ):
        self.stride = stride
        kernel = _he_normal(rngs.params(), (size, size, inputs, outputs))
        self.kernel = parameter(kernel, "kernel_h", "kernel_w", "conv_in", "conv_out")
        self.norm = nnx.BatchNorm(
            outputs,
            momentum=config.bn_momentum,
            epsilon=config.bn_eps,
            dtype=jnp.float32,
            scale_init=nnx.initializers.zeros if zero_scale else nnx.initializers.ones,
            scale_metadata={"out_sharding": ("norm",), "eager_sharding": False},
            bias_metadata={"out_sharding": ("norm",), "eager_sharding": False},
            rngs=rngs,
        )
        for statistic in (self.norm.mean, self.norm.var):
            statistic.set_metadata(out_sharding=("norm",))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        pad = kernel.shape[0] // 2
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(self.stride, self.stride),
            padding=((pad, pad), (pad, pad)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        y = constrain(y, "batch", "height", "width", "channels")
        return self.norm(y).astype(x.dtype)


class Block(nnx.Module):
    """A basic block (two 3x3) or a bottleneck (1x1, 3x3, 1x1), added to its input."""

    def __init__(
        self, inputs: int, inner: int, stride: int, *, config: ResNetConfig, rngs: nnx.Rngs
    ):
        outputs = inner * config.expansion
        options = {"config": config, "rngs": rngs}
        if config.expansion > 1:
            self.branch = nnx.List(
                [
                    ConvNorm(inputs, inner, 1, **options),
                    ConvNorm(inner, inner, 3, stride, **options),
                    ConvNorm(inner, outputs, 1, zero_scale=True, **options),
                ]
            )
        else:
            self.branch = nnx.List(
                [
                    ConvNorm(inputs, inner, 3, stride, **options),
                    ConvNorm(inner, outputs, 3, zero_scale=True, **options),
                ]
            )
        changes = stride != 1 or inputs != outputs
        self.shortcut = ConvNorm(inputs, outputs, 1, stride, **options) if changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for layer in list(self.branch)[:-1]:
            y = jax.nn.relu(layer(y))
        y = self.branch[-1](y)
        return jax.nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class _Plan(NamedTuple):
    inputs: int
    inner: int
    stride: int


def _plan(config: ResNetConfig) -> Iterator[_Plan]:
    """Yields the blocks from first to last."""
    inputs = config.width
    for stage, count in enumerate(DEPTHS[config.depth]):
        inner = config.width * 2**stage
        for block in range(count):
            yield _Plan(inputs, inner, 2 if stage > 0 and block == 0 else 1)
            inputs = inner * config.expansion


class ResNet(nnx.Module):
    """A ResNet from images to logits."""

    def __init__(self, config: ResNetConfig, channels: int, num_classes: int, *, rngs: nnx.Rngs):
        self.config = config
        size, stride = (7, 2) if config.stem == "imagenet" else (3, 1)
        self.stem = ConvNorm(channels, config.width, size, stride, config=config, rngs=rngs)
        self.blocks = nnx.List([Block(*p, config=config, rngs=rngs) for p in _plan(config)])
        features = {"conv_in": config.widths[-1]}
        self.head = Linear(features, {"classes": num_classes}, stddev=0.01, bias=True, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits [batch, classes] of `images` [batch, height, width, channels]."""
        x = jax.nn.relu(self.stem(images))
        if self.config.stem == "imagenet":
            x = _max_pool(x)
        for block in self.blocks:
            x = block(x)
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
        return constrain(self.head(x), "batch", "classes")


def _max_pool(x: jax.Array) -> jax.Array:
    """Returns a 3x3 max pool with stride 2 and padding 1."""
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)


def make(config: ResNetConfig, data: DataSpec, rngs: nnx.Rngs) -> ResNet:
    """Returns a new ResNet for `data`.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    faults = validate(config, data)
    if faults:
        raise ModelError("the ResNet cannot be made:\n  " + "\n  ".join(faults))
    channels, classes = config.channels, config.classes(data)
    if channels is None:
        assert data.image_shape is not None
        channels = data.image_shape[2]
    config = dataclasses.replace(config, channels=channels, num_classes=classes)
    return ResNet(config, channels, classes, rngs=rngs)


def validate(config: ResNetConfig, data: DataSpec) -> list[str]:
    """Returns all faults of a config, alone and with its data, as sentences."""
    faults = []
    for name in ("width", "num_classes", "channels"):
        value = getattr(config, name)
        if value is not None and value < 1:
            faults.append(f"{name} is {value}; it must be at least 1.")
    if not 0.0 <= config.bn_momentum < 1.0:
        faults.append(f"bn_momentum is {config.bn_momentum}; it must be in [0, 1).")
    if data.image_shape is None:
        if config.channels is None:
            faults.append("the data have no image_shape (height, width, channels).")
    elif config.channels not in (None, data.image_shape[2]):
        faults.append(
            f"the data have {data.image_shape[2]} channels, but channels={config.channels}; "
            "leave it out."
        )
    return faults + faults_of_size(config, data, "num_classes", "classes")


def flops_per_example(config: ResNetConfig, data: DataSpec) -> float:
    """Returns the model FLOPs of one image, forward and backward.

    The count is 2 FLOPs for each multiply-add of the convolutions and the classifier forward, and
    twice that backward. Normalisation, pooling and activations are not counted.

    Raises:
        ModelError: If `validate` finds faults.
    """
    faults = validate(config, data)
    if faults:
        raise ModelError("the FLOPs of the ResNet are not defined:\n  " + "\n  ".join(faults))
    if data.image_shape is None:
        raise ModelError(
            "the FLOPs of an image depend on its size, which the data do not set.\n"
            "  Give DataSpec(image_shape=...)."
        )
    height, width, channels = data.image_shape
    total = 0.0

    def conv(inputs: int, outputs: int, size: int, stride: int) -> None:
        nonlocal total, height, width
        height, width = -(-height // stride), -(-width // stride)
        total += float(height * width * size**2 * inputs * outputs)

    imagenet = config.stem == "imagenet"
    conv(channels, config.width, 7 if imagenet else 3, 2 if imagenet else 1)
    if imagenet:
        height, width = -(-height // 2), -(-width // 2)
    outputs = config.width
    for inputs, inner, stride in _plan(config):
        outputs = inner * config.expansion
        if config.expansion > 1:
            conv(inputs, inner, 1, 1)
            conv(inner, inner, 3, stride)
            conv(inner, outputs, 1, 1)
        else:
            conv(inputs, inner, 3, stride)
            conv(inner, outputs, 3, 1)
        if stride != 1 or inputs != outputs:
            total += float(height * width * inputs * outputs)
    total += float(outputs * config.classes(data))
    return 2 * 3 * total


FAMILY = ModelFamily(
    config=ResNetConfig,
    inputs=IMAGES,
    make=make,
    validate=validate,
    loss=loss,
    flops_per_example=flops_per_example,
    architectures={"ResNetForImageClassification": "shardlib_models.hf.resnet:RESNET"},
)
