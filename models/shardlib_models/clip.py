"""CLIP: an encoder of texts and one of images, whose features of a pair lie close to each other.

Source: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language
Supervision".
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.config import configclass
from shardlib.errors import ModelError
from shardlib.losses import Mean
from shardlib.registry import IMAGE_TEXT, DataSpec, ModelFamily
from shardlib.sharding.constrain import constrain
from shardlib_models.encoder import EncoderFields, encode, faults_of_fields, norm_of, stack
from shardlib_models.layers import Embedding, Linear, parameter, residual
from shardlib_models.sizes import CLIP_SIZES
from shardlib_models.vit import Patches, PatchFields, faults_of_patches, with_images


@configclass
class ClipTextConfig(EncoderFields):
    """The encoder of texts: causal, read at the end of the text."""

    vocab_size: int | None = None
    """Number of rows of the embedding; null for the vocabulary of the data."""
    max_positions: int = 77
    """Longest text, in tokens."""
    end_token: int | None = None
    """Id of the token whose first occurrence ends a text; null for that of the data, or else for
    the largest id in the text."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = "quick_gelu"
    """Nonlinearity of the MLP."""
    norm_eps: float = 1e-5
    """Value added to the variance in a LayerNorm."""


@configclass
class ClipImageConfig(PatchFields):
    """The encoder of images: a ViT with a norm before its layers, read at the class token."""

    patch_size: int = 32
    """Height and width of a patch in pixels; divides image_size."""
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = "quick_gelu"
    """Nonlinearity of the MLP."""
    norm_eps: float = 1e-5
    """Value added to the variance in a LayerNorm."""


@configclass
class ClipConfig:
    """Two encoders that are trained to find the pairs in a batch of texts and images."""

    name: Literal["clip"] = "clip"
    text: ClipTextConfig = dataclasses.field(default_factory=ClipTextConfig)
    """The encoder of texts."""
    image: ClipImageConfig = dataclasses.field(default_factory=ClipImageConfig)
    """The encoder of images."""
    feature_dim: int = 512
    """Width of the features."""
    init_log_scale: float = 2.6592
    """Logarithm of the factor of similarities at the start: log(1 / 0.07). The loss multiplies by
    100 at most."""
    init_from: str | None = None
    """A folder in the format of Hugging Face, or its name on the hub, whose weights the run starts
    from; its config.json gives the fields that are left out."""

    @property
    def vocab_size(self) -> int | None:
        """The number of rows of the embedding."""
        return self.text.vocab_size


class TextTower(nnx.Module):
    """Texts to features."""

    def __init__(self, config: ClipTextConfig, feature_dim: int, *, rngs: nnx.Rngs):
        assert config.vocab_size is not None, "`make` fills it in"
        self.config = config
        width, stddev = config.embed_dim, config.init_stddev
        self.token_embedding = Embedding(
            config.vocab_size, width, "vocab", stddev=stddev, rngs=rngs
        )
        positions = stddev * jax.random.normal(rngs.params(), (config.max_positions, width))
        self.positions = parameter(positions, "positions", "embed")
        self.layers = stack(config, norms="pre", causal=True, rngs=rngs)
        self.final_norm = norm_of(config)
        self.projection = projection_of(config, feature_dim, rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        """Returns the features [batch, features] of `tokens` [batch, length]."""
        config, length = self.config, tokens.shape[1]
        x = self.token_embedding(tokens) + self.positions[:length][None]
        x = encode(self.layers, residual(x), segment_ids, config)
        is_end = tokens if config.end_token is None else tokens == config.end_token
        last = jnp.argmax(is_end, axis=1)
        x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
        return self.projection(self.final_norm(constrain(x, "batch", "embed")))


class ImageTower(nnx.Module):
    """Images to features."""

    def __init__(self, config: ClipImageConfig, feature_dim: int, *, rngs: nnx.Rngs):
        self.config = config
        self.patches = Patches(config, bias=False, rngs=rngs)
        self.first_norm = norm_of(config)
        self.layers = stack(config, norms="pre", rngs=rngs)
        self.final_norm = norm_of(config)
        self.projection = projection_of(config, feature_dim, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the features [batch, features] of `images` [batch, height, width, channels]."""
        x = residual(self.first_norm(self.patches(images)))
        x = encode(self.layers, x, None, self.config)[:, 0]
        return self.projection(self.final_norm(constrain(x, "batch", "embed")))


class Clip(nnx.Module):
    """Pairs of texts and images to features of length 1."""

    def __init__(self, config: ClipConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.text = TextTower(config.text, config.feature_dim, rngs=rngs)
        self.image = ImageTower(config.image, config.feature_dim, rngs=rngs)
        self.log_scale = nnx.Param(jnp.float32(config.init_log_scale))

    def __call__(
        self, tokens: jax.Array, images: jax.Array, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Returns the features [batch, 2, features] of texts and of images, in float32.

        The similarity of a text and an image is exp(log_scale) times the product of their features.

        Args:
            tokens: [batch, length] int32.
            images: [batch, height, width, channels].
            segment_ids: [batch, length] int32, 1 and 0 for padding; None without padding.

        Raises:
            ModelError: If arrays have other dims than these, a text is too long, or the images have
                another size or number of channels; the message lists all faults.
        """
        _check(self.config, tokens, images, segment_ids)
        pair = self.text(tokens, segment_ids), self.image(images)
        return jnp.stack([_normalized(x.astype(jnp.float32)) for x in pair], axis=1)


def _check(
    config: ClipConfig, tokens: jax.Array, images: jax.Array, segment_ids: jax.Array | None
) -> None:
    """Raises `ModelError` with all faults of the inputs of a CLIP."""
    size, channels, longest = (
        config.image.image_size,
        config.image.channels,
        config.text.max_positions,
    )
    texts, faults = list(jnp.shape(tokens)), []
    if len(texts) != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        faults.append(f"the texts are {tokens.dtype}{texts}, expected integers [batch, length]")
    elif texts[1] > longest:
        faults.append(
            f"the texts have {texts[1]} tokens, more than text.max_positions={longest}: cut them"
        )
    expected = [*texts[:1], size, size, channels]
    if list(images.shape) != expected or not jnp.issubdtype(images.dtype, jnp.floating):
        faults.append(
            f"the images are {images.dtype}{list(images.shape)}, expected floating-point numbers "
            f"{expected} (batch, height, width, channels)"
        )
    if segment_ids is not None and list(segment_ids.shape) != texts:
        faults.append(f"segment_ids are {list(segment_ids.shape)}, expected {texts} as the texts")
    if faults:
        raise ModelError(
            "the CLIP cannot read its inputs:\n  "
            + "\n  ".join(faults)
            + "\n  Give one image for each text, scaled as preprocessor_config.json says."
        )


def projection_of(config: EncoderFields, feature_dim: int, rngs: nnx.Rngs) -> Linear:
    """Returns the projection from the residual stream to features."""
    inputs, outputs = {"embed": config.embed_dim}, {"features": feature_dim}
    return Linear(inputs, outputs, stddev=config.init_stddev, rngs=rngs)


def _bounded(log_scale: jax.Array) -> jax.Array:
    """Returns log(100) at most, with the gradient of `log_scale`, so that it can fall again.

    Source: section 2.5 of the paper.
    """
    above = jnp.maximum(log_scale - math.log(100.0), 0.0)
    return log_scale - jax.lax.stop_gradient(above)


def _normalized(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))


def loss(
    model: Clip, batch: dict[str, Any], rng: jax.Array, *, train: bool
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss of finding each text's image, and each image's text, in the batch.

    All texts of the batch compete for an image, whatever the mesh. Microbatches would compete among
    themselves, so a run refuses them.

    Args:
        model: A CLIP for this step alone: it is put into training or evaluation mode.
        batch: `tokens` [batch, length] int32, `images` [batch, height, width, channels], and for
            padded texts `segment_ids` (1, and 0 for padding). Pairs of padding alone do not count.
        rng: Not used: dropout draws from the model's own streams.
        train: Whether dropout is on.

    Returns:
        The loss and the metric `accuracy`: the texts and images whose partner is the closest.
    """
    del rng
    if train:
        model.train()
    else:
        model.eval()
    segment_ids = batch.get("segment_ids")
    features = model(batch["tokens"], batch["images"], segment_ids)
    text, image = (constrain(features[:, side], "batch", None) for side in (0, 1))
    rows = text.shape[0]
    counts = jnp.ones(rows, bool) if segment_ids is None else jnp.any(segment_ids > 0, axis=1)
    scale = jnp.exp(_bounded(model.log_scale[...].astype(jnp.float32)))
    own, right, total = jnp.arange(rows), jnp.float32(0.0), jnp.float32(0.0)
    for query, key in ((text, image), (image, text)):
        # All keys on every device: [rows of the device, rows of the batch].
        scores = scale * jnp.einsum("qd,kd->qk", query, constrain(key, None, None))
        scores = jnp.where(counts[None, :], scores, -jnp.inf)
        chosen = jnp.take_along_axis(scores, own[:, None], axis=1)[:, 0]
        losses = jax.nn.logsumexp(scores, axis=1) - chosen
        total += jnp.sum(jnp.where(counts, losses, 0.0))
        hits = counts & (jnp.argmax(scores, axis=1) == own)
        right += jnp.sum(hits.astype(jnp.float32))
    weight = 2.0 * jnp.sum(counts.astype(jnp.float32))
    return Mean(total, weight), {"accuracy": Mean(right, weight)}


def validate(config: ClipConfig, data: DataSpec) -> list[str]:
    """Returns all faults of a config, alone and with its data, as sentences."""
    text, image = config.text, config.image
    faults = [f"text: {fault}" for fault in faults_of_fields(text)]
    faults += [f"image: {fault}" for fault in faults_of_fields(image)]
    faults += [f"image: {fault}" for fault in faults_of_patches(image, data)]
    vocab, length = text.vocab_size or data.vocab_size, data.sequence_length
    if vocab is None:
        faults.append("text.vocab_size is unknown: neither the model nor its data set it.")
    elif data.vocab_size is not None and data.vocab_size > vocab:
        faults.append(
            f"the data have {data.vocab_size} tokens, but text.vocab_size={vocab}; raise it."
        )
    if length is not None and length > text.max_positions:
        faults.append(
            f"texts of {length} tokens are longer than text.max_positions={text.max_positions}; "
            "raise it, or shorten data.sequence_length."
        )
    if None not in (text.end_token, data.end_token) and text.end_token != data.end_token:
        faults.append(
            f"the data end texts with token {data.end_token}, but text.end_token="
            f"{text.end_token}; let data.tokenizer be the tokenizer of the model."
        )
    if config.feature_dim < 1:
        faults.append(f"feature_dim is {config.feature_dim}; it must be at least 1.")
    return faults


def make(config: ClipConfig, data: DataSpec, rngs: nnx.Rngs) -> Clip:
    """Returns a new CLIP for `data`.

    Raises:
        ModelError: If `validate` finds faults; the message lists all of them.
    """
    if faults := validate(config, data):
        raise ModelError("the CLIP cannot be made:\n  " + "\n  ".join(faults))
    size, end = config.text.vocab_size or data.vocab_size, config.text.end_token
    end = data.end_token if end is None else end
    text = dataclasses.replace(config.text, vocab_size=size, end_token=end)
    full = dataclasses.replace(config, text=text, image=with_images(config.image, data))
    return Clip(full, rngs=rngs)


FAMILY = ModelFamily(
    config=ClipConfig,
    inputs=IMAGE_TEXT,
    make=make,
    validate=validate,
    loss=loss,
    couples_rows=True,
    architectures={"CLIPModel": "shardlib_models.hf.clip:CLIP"},
    sizes=CLIP_SIZES,
)
