"""Layers that reduce over the axis of a `pmap`: here their batch is the global one already."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib as sl
from shardlib.paths import named_leaves

X = jax.ShapeDtypeStruct((8, 8, 8, 4), jnp.float32)
STEPS = 3


class ConvNet(linen.Module):
    """As in Flax's example of ImageNet, in which training is a `pmap` over "batch"."""

    axis_name: str | None = "batch"

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Conv(16, (3, 3), use_bias=False)(x)
        x = linen.BatchNorm(use_running_average=not train, axis_name=self.axis_name)(x)
        return linen.Dense(8)(linen.relu(x).mean((1, 2)))


class NnxNet(nnx.Module):
    def __init__(self, rngs, axis_name="batch"):
        self.conv = nnx.Conv(4, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=axis_name, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x, train: bool):
        x = self.norm(self.conv(x), use_running_average=not train)
        return self.head(nnx.relu(x).mean((1, 2)))


MODELS = {
    "linen": (lambda name: ConvNet(name), {"inputs": (X, True)}),
    "nnx": (lambda name: lambda rngs: NnxNet(rngs, name), {}),
}


def batch():
    rng = np.random.default_rng(0)
    # Rows differ in their mean, so that a device's own statistics are not those of the batch.
    x = rng.normal(size=(32, 8, 8, 4)) + np.arange(32)[:, None, None, None]
    return {"x": x.astype(np.float32), "y": rng.normal(size=(32, 8)).astype(np.float32)}


def loss_fn(model, batch, rng):
    return jnp.mean((model(batch["x"], train=True) - batch["y"]) ** 2)


def evaluation(model, batch, rng):
    return jnp.mean((model(batch["x"], train=False) - batch["y"]) ** 2)


def train(kind, axis_name, mesh, **options):
    make, arguments = MODELS[kind]
    mesh = sl.make_mesh(mesh, devices=jax.devices()[: 1 if mesh == "data=1" else 8])
    with sl.use(mesh, sl.rules.FSDP):
        state = sl.init_state(make(axis_name), optax.sgd(0.05), **arguments)
        step, losses = sl.make_train_step(loss_fn, **options), []
        for _ in range(STEPS):
            state, metrics = step(state, batch())
            losses.append(float(metrics["loss"]))
    return state, losses


def assert_close(found, expected):
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    for part in ("params", "model_state"):
        leaves, wanted = (named_leaves(getattr(each[0], part)) for each in (found, expected))
        assert leaves.keys() == wanted.keys()
        for path, leaf in leaves.items():
            np.testing.assert_allclose(leaf, wanted[path], rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.mesh
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mesh", ["fsdp=8", "data=2,fsdp=4"])
def test_statistics_are_those_of_the_global_batch(kind, mesh):
    found = train(kind, "batch", mesh)
    assert_close(found, train(kind, None, "data=1"))
    assert found[1][-1] < found[1][0]


@pytest.mark.mesh
@pytest.mark.parametrize("kind", MODELS)
def test_the_name_may_be_that_of_a_mesh_axis(kind):
    for name, options in (("data", {}), ("fsdp", {"microbatches": 2})):
        found, expected = (train(kind, each, "data=2,fsdp=4", **options) for each in (name, None))
        assert_close(found, expected)


@pytest.mark.mesh
@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_of_such_a_model(kind):
    state, _ = train(kind, "batch", "fsdp=8")
    alone, _ = train(kind, None, "data=1")
    for loss in (evaluation, loss_fn):
        found, expected = (sl.make_eval_step(loss)(s, batch())["loss"] for s in (state, alone))
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-4)


class Reducing(linen.Module):
    at_init: bool

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(8)(x.mean((1, 2)))
        return jax.lax.pmean(x, "devices") if self.at_init or not self.is_initializing() else x


@pytest.mark.parametrize("at_init", [True, False])
def test_refuses_an_axis_that_no_layer_names(at_init):
    def loss(model, batch, rng):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def start():
        with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
            state = sl.init_state(Reducing(at_init), optax.sgd(0.1), inputs=(X,))
            sl.make_train_step(loss)(state, batch())

    with pytest.raises(sl.ShardlibError, match=r"Reducing or its loss .* 'devices', .*\n  Drop"):
        start()


def test_a_name_error_of_the_users_own_stays_one():
    def loss(model, batch, rng):
        return undefined_thing  # noqa: F821

    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
        state = sl.init_state(dataclasses.replace(ConvNet()), optax.sgd(0.1), inputs=(X, True))
        with pytest.raises(NameError, match="undefined_thing"):
            sl.make_train_step(loss)(state, batch())
