"""The same training on any mesh: what the tests of this folder share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.paths import named_leaves
from shardlib.registry import DataSpec, family
from shardlib.run.setup import TEXT_AXES

# Sums of float32 numbers in another order differ by a few times 2**-24 of the largest term, per
# level of the reduction; 30 steps of an optimizer carry that on.
RELATIVE = 1e-5


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and its batches."""

    make: Callable[..., Any]
    loss: Callable[..., Any]
    batches: list[dict[str, np.ndarray]]
    batch_axes: Any

    def train(self, mesh, optimizer=None, steps=None, *, num_devices=8, microbatches=1):
        """Trains on a mesh; returns the state, the losses and the step."""
        mesh = sl.make_mesh(mesh, devices=jax.devices()[:num_devices])
        optimizer = optimizer or optax.adamw(3e-3)
        with sl.use(mesh, sl.rules.STANDARD):
            state = sl.init_state(self.make, optimizer, seed=0)
        step = sl.make_train_step(self.loss, batch_axes=self.batch_axes, microbatches=microbatches)
        losses = []
        for batch in self.batches[:steps]:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return state, losses, step


def assert_leaves_close(tree, expected, relative=RELATIVE):
    """Every leaf within `relative` of the largest magnitude of the expected leaf."""
    found, wanted = named_leaves(jax.device_get(tree)), named_leaves(jax.device_get(expected))
    assert found.keys() == wanted.keys()
    far = {}
    for path, value in wanted.items():
        error = np.abs(np.asarray(found[path], np.float64) - value).max(initial=0)
        scale = np.abs(value).max(initial=0)
        if error > relative * scale:
            far[path] = (error, scale)
    assert not far


def keep_gradients():
    """An optimizer whose state is the gradient of the last step, and which changes nothing."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jax.numpy.zeros_like, grads), grads),
    )


def _packed_batch(rng, batch, length, vocab):
    segments = np.sort(rng.integers(1, 4, (batch, length)), axis=1).astype(np.int32)
    segments[:, -2:] = 0
    starts = np.stack([np.searchsorted(row[:-2], row) for row in segments])
    positions = np.where(segments > 0, np.arange(length)[None] - starts, 0).astype(np.int32)
    return {
        "tokens": rng.integers(0, vocab, (batch, length), dtype=np.int32),
        "targets": rng.integers(0, vocab, (batch, length), dtype=np.int32),
        "segment_ids": segments,
        "positions": positions,
        "num_bytes": np.full(batch, 3 * length, np.int32),
    }


def _task(name, config, data, batches, batch_axes):
    chosen = family(name)
    assert chosen.validate(config, data) == []
    return Task(
        lambda rngs: chosen.make(config, data, rngs),
        lambda model, batch, rng: chosen.loss(model, batch, rng, train=True),
        batches,
        batch_axes,
    )


@pytest.fixture(scope="session")
def transformer():
    from shardlib_models.transformer import TransformerConfig

    config = TransformerConfig(num_layers=2, embed_dim=32, num_heads=8, mlp_dim=64, dropout=0.1)
    rng = np.random.default_rng(0)
    batches = [_packed_batch(rng, 8, 16, 64) for _ in range(30)]
    return _task("transformer", config, DataSpec(64, 16), batches, TEXT_AXES)


@pytest.fixture(scope="session")
def resnet():
    from shardlib_models.resnet import ResNetConfig
    from sklearn.datasets import load_digits

    config = ResNetConfig(depth=18, stem="small", width=8)
    digits = load_digits()
    images = (digits.images / 8 - 1).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    rows = [slice(32 * i, 32 * i + 32) for i in range(30)]
    batches = [{"images": images[r], "labels": labels[r]} for r in rows]
    return _task("resnet", config, DataSpec(num_classes=10, image_shape=(8, 8, 1)), batches, {})
