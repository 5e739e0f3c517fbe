"""ViT: its patches, losses on meshes, and configs that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.registry import DataSpec
from shardlib_models.vit import FAMILY, VitConfig, make, validate

DATA = DataSpec(num_classes=8, image_shape=(8, 8, 1))
SIZES = {"num_layers": 2, "embed_dim": 32, "mlp_dim": 48, "patch_size": 4}


@pytest.mark.mesh
def test_each_patch_is_projected_and_follows_the_class_token():
    patches = make(VitConfig(**SIZES), DATA, nnx.Rngs(0)).patches
    images = np.random.default_rng(0).standard_normal((2, 8, 8, 1), np.float32)
    actual = patches(jnp.asarray(images)) - patches.positions[...][None]
    kernel = patches.projection.kernel[...].reshape(16, 32)
    np.testing.assert_allclose(actual[:, 0], [patches.class_token[...]] * 2, atol=1e-6)
    for at, (row, column) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
        patch = images[:, row : row + 4, column : column + 4].reshape(2, 16)
        np.testing.assert_allclose(actual[:, 1 + at], patch @ kernel, atol=1e-5)


WRONG = {
    "patches": ({"patch_size": 3}, "patch_size=3 does not divide images of 8 pixels"),
    "size": ({"image_size": 16}, r"\[8, 8, 1\].*\[16, 16, 1\]"),
    "channels": ({"channels": 0}, "channels is 0"),
    "classes": ({"num_classes": 2}, "the data have 8 classes, but num_classes=2"),
    "heads": ({"num_heads": 5}, "embed_dim=32 is not a multiple of num_heads=5"),
}


@pytest.mark.parametrize(("changes", "fault"), WRONG.values(), ids=WRONG)
def test_faults_are_named(changes, fault):
    with pytest.raises(ModelError, match=fault):
        make(VitConfig(**{**SIZES, **changes}), DATA, nnx.Rngs(0))


def test_unknown_sizes_are_named():
    assert validate(VitConfig(), DataSpec()) == [
        "image_size or channels is unknown: neither the model nor its data set it.",
        "num_classes is unknown: neither the model nor its data set it.",
    ]


def losses(mesh, devices=None, steps=3):
    batch = FAMILY.inputs.example(np.random.default_rng(0), 8, DATA)
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        state = sl.init_state(lambda rngs: make(VitConfig(**SIZES), DATA, rngs), optax.adam(1e-2))
        step = sl.make_train_step(
            lambda model, batch, rng: FAMILY.loss(model, batch, rng, train=True)
        )
        found = []
        for _ in range(steps):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.mesh
def test_losses_on_meshes_are_those_of_one_device():
    with jax.default_matmul_precision("highest"):
        expected = losses("data=1", jax.devices()[:1])
        for mesh in ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"):
            # Sums in another order, through three updates of Adam.
            np.testing.assert_allclose(losses(mesh), expected, rtol=2e-5, err_msg=mesh)
    assert np.ptp(expected) > 1e-3
