"""ViT: an encoder of images that are cut into patches.

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words".
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.config import configclass
from shardlib.errors import ModelError
from shardlib.registry import IMAGES, DataSpec, ModelFamily
from shardlib.sharding.constrain import constrain
from shardlib_models.data_sizes import faults_of_size
from shardlib_models.encoder import EncoderFields, encode, faults_of_fields, norm_of, stack
from shardlib_models.image_loss import loss
from shardlib_models.layers import Linear, dropout, parameter, residual


@configclass
class PatchFields(EncoderFields):
    """The fields of encoders of images."""

    patch_size: int = 16
    """Height and width of a patch in pixels; divides image_size."""
    image_size: int | None = None
    """Height and width of an image in pixels; null for the images of the data."""
    channels: int | None = None
    """Channels of an image; null for the images of the data."""

    @property
    def num_patches(self) -> int:
        """The number of patches of an image."""
        assert self.image_size is not None, "`with_images` fills it in"
        return (self.image_size // self.patch_size) ** 2


@configclass
class VitConfig(PatchFields):
    """A transformer for the classification of images."""

    name: Literal["vit"] = "vit"
    num_classes: int | None = None
    """Number of logits; null for the number of classes of the data."""
    init_from: str | None = None
    """A folder in the format of Hugging Face, or its name on the hub, whose weights the run starts
    from; its config.json gives the fields that are left out."""


class Patches(nnx.Module):
    """Images as the first residual stream: a class token, and a projection of each patch."""

    def __init__(self, config: PatchFields, *, bias: bool, rngs: nnx.Rngs):
        self.config = config
        assert config.channels is not None, "`with_images` fills it in"
        size, width, stddev = config.patch_size, config.embed_dim, config.init_stddev
        inputs = {"kernel_h": size, "kernel_w": size, "conv_in": config.channels}
        self.projection = Linear(inputs, {"embed": width}, stddev=stddev, bias=bias, rngs=rngs)
        self.class_token = parameter(stddev * jax.random.normal(rngs.params(), (width,)), "embed")
        shape = config.num_patches + 1, width
        positions = stddev * jax.random.normal(rngs.params(), shape)
        self.positions = parameter(positions, "positions", "embed")

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns [batch, 1 + patches, embed] for `images` [batch, height, width, channels].

        Raises:
            ModelError: If the images have another size.
        """
        config = self.config
        expected = (config.image_size, config.image_size, config.channels)
        if images.shape[1:] != expected:
            raise ModelError(
                f"the images are {list(images.shape[1:])}, expected {list(expected)} (height, "
                "width, channels).\n  Resize them, or make the model with another image_size."
            )
        count, size = images.shape[1] // config.patch_size, config.patch_size
        x = images.reshape(images.shape[0], count, size, count, size, images.shape[3])
        x = jnp.swapaxes(x, 2, 3).reshape(images.shape[0], count**2, size, size, images.shape[3])
        x = residual(self.projection(x))
        first = jnp.broadcast_to(self.class_token[...][None, None], (x.shape[0], 1, x.shape[2]))
        return residual(jnp.concatenate([first, x], axis=1) + self.positions[...][None])


class Vit(nnx.Module):
    """A ViT from images to logits."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        assert config.num_classes is not None, "`make` fills it in"
        self.config = config
        self.patches = Patches(config, bias=True, rngs=rngs)
        self.layers = stack(config, norms="pre", rngs=rngs)
        self.final_norm = norm_of(config)
        inputs, outputs = {"embed": config.embed_dim}, {"classes": config.num_classes}
        self.head = Linear(inputs, outputs, stddev=config.init_stddev, bias=True, rngs=rngs)
        self.embedding_dropout = dropout(config.dropout, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits [batch, classes] of `images` [batch, height, width, channels].

        Raises:
            ModelError: If the images have another size.
        """
        x = self.embedding_dropout(self.patches(images))
        x = encode(self.layers, x, None, self.config)[:, 0]
        return constrain(
            self.head(self.final_norm(constrain(x, "batch", "embed"))), "batch", "classes"
        )


def with_images(config: Any, data: DataSpec) -> Any:
    """Returns a config with the size and the channels of the images of the data."""
    height, _, channels = data.image_shape or (None, None, None)
    return dataclasses.replace(
        config, image_size=config.image_size or height, channels=config.channels or channels
    )


def faults_of_patches(config: PatchFields, data: DataSpec) -> list[str]:
    """Returns the faults of the fields of images, as sentences."""
    names = ("patch_size", "image_size", "channels")
    values = {name: getattr(config, name) for name in names}
    faults = [
        f"{name} is {value}; it must be at least 1."
        for name, value in values.items()
        if value is not None and value < 1
    ]
    if faults:
        return faults
    shape, full = data.image_shape, with_images(config, data)
    if full.image_size is None or full.channels is None:
        return ["image_size or channels is unknown: neither the model nor its data set it."]
    if shape is not None and shape != (full.image_size, full.image_size, full.channels):
        faults.append(
            f"the images of the data are {list(shape)} (height, width, channels), but the model "
            f"takes {[full.image_size, full.image_size, full.channels]}; leave out image_size and "
            "channels, and let the data have square images."
        )
    elif full.image_size % full.patch_size:
        faults.append(
            f"patch_size={full.patch_size} does not divide images of {full.image_size} pixels."
        )
    return faults


def validate(config: VitConfig, data: DataSpec) -> list[str]:
    """Returns all faults of a config, alone and with its data, as sentences."""
    faults = faults_of_fields(config) + faults_of_patches(config, data)
    if config.num_classes is not None and config.num_classes < 1:
        return [*faults, f"num_classes is {config.num_classes}; it must be at least 1."]
    return faults + faults_of_size(config, data, "num_classes", "classes")


def make(config: VitConfig, data: DataSpec, rngs: nnx.Rngs) -> Vit:
    """Returns a new ViT for `data`.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    if faults := validate(config, data):
        raise ModelError("the ViT cannot be made:\n  " + "\n  ".join(faults))
    classes = config.num_classes or data.num_classes
    return Vit(dataclasses.replace(with_images(config, data), num_classes=classes), rngs=rngs)


FAMILY = ModelFamily(
    config=VitConfig,
    inputs=IMAGES,
    make=make,
    validate=validate,
    loss=loss,
    architectures={"ViTForImageClassification": "shardlib_models.hf.vit:VIT"},
)
