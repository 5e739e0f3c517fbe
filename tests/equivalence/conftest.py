import functools

import numpy as np
import optax
import pytest
from equivalence import make_task, packed_batch

from shardlib.registry import DataSpec
from shardlib.run.setup import TEXT_AXES

OPTIMIZERS = {
    "transformer": functools.partial(optax.adamw, 3e-3),
    # Batch normalisation over few examples magnifies rounding. At ten times this rate the loss
    # itself is chaotic: differences grow tenfold in two steps, on any mesh.
    "resnet": functools.partial(optax.sgd, 3e-3, momentum=0.9),
}


@pytest.fixture(scope="session")
def transformer():
    from shardlib_models.transformer import TransformerConfig

    config = TransformerConfig(num_layers=2, embed_dim=32, num_heads=8, mlp_dim=64, dropout=0.1)
    rng = np.random.default_rng(0)
    batches = [packed_batch(rng, 8, 16, 64) for _ in range(30)]
    return make_task("transformer", config, DataSpec(64, 16), batches, TEXT_AXES)


@pytest.fixture(scope="session")
def resnet():
    from sklearn.datasets import load_digits

    from shardlib_models.resnet import ResNetConfig

    config = ResNetConfig(depth=18, stem="small", width=8)
    digits = load_digits()
    images = (digits.images / 8 - 1).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    # The last stage normalises one pixel an example: few examples would be ill-conditioned.
    rows = [np.arange(128 * i, 128 * i + 128) % len(labels) for i in range(30)]
    batches = [{"images": images[r], "labels": labels[r]} for r in rows]
    return make_task("resnet", config, DataSpec(num_classes=10, image_shape=(8, 8, 1)), batches, {})


@pytest.fixture(scope="session")
def run(request):
    """Trains a task on a mesh, once in a session."""

    @functools.cache
    def train(name, mesh, microbatches, num_devices=8):
        task = request.getfixturevalue(name)
        optimizer = OPTIMIZERS[name]()
        return task.train(mesh, optimizer, num_devices=num_devices, microbatches=microbatches)

    return train
