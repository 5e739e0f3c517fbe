"""What is trained on every mesh: the models, their data and their optimizers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from shardlib.nn.moe import balance_biases
from shardlib.registry import LATENTS, TEXT, DataSpec, family
from shardlib.testing import Reference
from shardlib_models.moe import MoEConfig
from shardlib_models.resnet import ResNetConfig
from shardlib_models.transformer import TransformerConfig
from shardlib_models.unet_config import UNetConfig

VOCAB, BATCH, LENGTH = 64, 8, 16
NUM_BATCHES = 30


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model, its data, and an optimizer."""

    config: Any
    data: DataSpec
    batches: Callable[[], list[dict[str, np.ndarray]]]
    optimizer: Callable[[], optax.GradientTransformation]
    batch_axes: Any = dataclasses.field(default_factory=dict)
    added: float = 0.0
    """Magnitude of what is added to the initial parameters. Where some are 0, others have no
    gradient."""

    def make(self, changes: Any) -> Callable[..., Any]:
        """Returns what makes the model, of the config with changes."""
        config = dataclasses.replace(self.config, **dict(changes))
        chosen = family(config.name)
        assert chosen.validate(config, self.data) == []
        return lambda rngs: self._changed(chosen.make(config, self.data, rngs))

    def _changed(self, model: Any) -> Any:
        def changed(x: jax.Array) -> jax.Array:
            # Waves rather than noise, which would take long to compile.
            return x + self.added * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

        if self.added:
            nnx.update(model, jax.tree.map(changed, nnx.state(model, nnx.Param)))
        return model

    def loss(self, model: Any, batch: Any, rng: Any) -> Any:
        """The loss in training."""
        return family(self.config.name).loss(model, batch, rng, train=True)

    def reference(self, microbatches: int, changes: Any) -> Reference:
        """Returns the training on one device, of the config with changes."""
        return Reference(
            self.make(changes),
            self.loss,
            self.batches(),
            optimizer=self.optimizer(),
            microbatches=microbatches,
            batch_axes=self.batch_axes,
        )


@functools.cache
def packed_batches():
    """Returns random rows of up to three documents each, and two positions of padding."""
    rng = np.random.default_rng(0)
    return [_packed_batch(rng) for _ in range(NUM_BATCHES)]


def _packed_batch(rng):
    segments = np.sort(rng.integers(1, 4, (BATCH, LENGTH)), axis=1).astype(np.int32)
    segments[:, -2:] = 0
    starts = np.stack([np.searchsorted(row[:-2], row) for row in segments])
    positions = np.where(segments > 0, np.arange(LENGTH)[None] - starts, 0).astype(np.int32)
    return {
        "tokens": rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32),
        "targets": rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32),
        "segment_ids": segments,
        "positions": positions,
        "num_bytes": np.full(BATCH, 3 * LENGTH, np.int32),
    }


@functools.cache
def digit_batches():
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 8 - 1).astype(np.float32)
    labels = labels.astype(np.int32)
    # The last stage normalises one pixel an example: few examples would be ill-conditioned.
    rows = [np.arange(128 * i, 128 * i + 128) % len(labels) for i in range(NUM_BATCHES)]
    return [{"images": images[r], "labels": labels[r]} for r in rows]


# Layers at one of two levels, two in a row, and texts of an odd length.
UNET_DATA = DataSpec(sequence_length=7, image_shape=(8, 8, 4), context_dim=24, pooled_dim=16)


@functools.cache
def latent_batches():
    rng = np.random.default_rng(0)
    return [LATENTS.example(rng, BATCH, UNET_DATA) for _ in range(NUM_BATCHES)]


# Fewer key-value heads than `tensor` has devices, packed rows, dropout.
_TRANSFORMER = TransformerConfig(
    num_layers=8, embed_dim=32, num_heads=8, num_kv_heads=2, mlp_dim=64, dropout=0.1
)

PROBLEMS = {
    "transformer": Problem(
        _TRANSFORMER,
        DataSpec(VOCAB, LENGTH),
        packed_batches,
        functools.partial(optax.adamw, 1e-3),
        TEXT.axes,
    ),
    # Experts that all tokens share too, and biases that even the load beside a loss that does.
    "moe": Problem(
        dataclasses.replace(
            _TRANSFORMER,
            num_layers=4,
            moe=MoEConfig(
                num_experts=8,
                mlp_dim=32,
                num_shared_experts=1,
                balance="bias",
                balance_loss=0.01,
                router_z_loss=0.001,
            ),
        ),
        DataSpec(VOCAB, LENGTH),
        packed_batches,
        lambda: balance_biases(optax.adamw(1e-3)),
        TEXT.axes,
    ),
    # Batch normalisation over few examples magnifies rounding. At ten times this rate the loss
    # itself is chaotic: differences grow tenfold in two steps, on any mesh.
    "resnet": Problem(
        ResNetConfig(depth=18, stem="small", width=8),
        DataSpec(num_classes=10, image_shape=(8, 8, 1)),
        digit_batches,
        functools.partial(optax.sgd, 3e-3, momentum=0.9),
    ),
    "unet": Problem(
        UNetConfig(
            width=16,
            num_resnets=1,
            transformer_depths=(0, 2),
            num_heads=8,
            pooled_dim=16,
            size_dim=8,
            norm_groups=8,
            prediction="v",
        ),
        UNET_DATA,
        latent_batches,
        functools.partial(optax.adamw, 1e-3),
        added=0.05,
    ),
}
