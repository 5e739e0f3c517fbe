"""What modules sow during a call: read by the loss, and never state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib as sl
from shardlib.paths import named_leaves

X = jax.ShapeDtypeStruct((4, 16), jnp.float32)
STEPS = 3


class Sowing(linen.Module):
    """Sows its hidden layer, a penalty in a tuple and a penalty as a running sum."""

    @linen.compact
    def __call__(self, x):
        for width in (32, 16):
            x = linen.BatchNorm(use_running_average=False)(linen.Dense(width)(x))
            self.sow("intermediates", "hidden", x)
            self.sow("losses", "penalty", jnp.mean(x**4))
            self.sow("sums", "penalty", jnp.mean(x**4), init_fn=lambda: 0.0, reduce_fn=jnp.add)
        return x


def batch():
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    return {"x": x, "y": np.tanh(x)}


def train(make, loss_fn, mesh, **options):
    mesh = sl.make_mesh(mesh, devices=jax.devices()[: 1 if mesh == "data=1" else 8])
    with sl.use(mesh, sl.rules.FSDP):
        state = sl.init_state(make, optax.sgd(0.05), **options)
        step, seen = sl.make_train_step(loss_fn), []
        for _ in range(STEPS):
            state, metrics = step(state, batch())
            seen.append({name: float(value) for name, value in metrics.items()})
    return state, seen


def read_by(model):
    """The penalty as each of the three collections tells it."""
    found = model.variables
    hidden = found["intermediates"]["hidden"]
    return {
        "intermediates": sum(jnp.mean(x**4) for x in hidden),
        "losses": sum(found["losses"]["penalty"]),
        "sums": found["sums"]["penalty"],
    }


def sowing_loss(model, batch, rng):
    error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    penalties = read_by(model)
    return error + 0.1 * penalties["losses"], {"error": error, **penalties}


@pytest.fixture(scope="module")
def sown():
    return {mesh: train(Sowing(), sowing_loss, mesh, inputs=(X,)) for mesh in ("fsdp=8", "data=1")}


def test_the_loss_reads_what_linen_sows(sown):
    for _, seen in sown.values():
        for metrics in seen:
            assert metrics["losses"] > 0.5
            for name in ("intermediates", "sums"):
                np.testing.assert_allclose(metrics[name], metrics["losses"], rtol=1e-5)
            found = metrics["error"] + 0.1 * metrics["losses"]
            np.testing.assert_allclose(metrics["loss"], found, rtol=1e-5)
    losses = [[m["loss"] for m in seen] for _, seen in sown.values()]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_the_gradient_flows_through_what_is_sown(sown):
    def without(model, batch, rng):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    with_penalty = sown["fsdp=8"][0].params["Dense_0"]["kernel"]
    plain = train(Sowing(), without, "fsdp=8", inputs=(X,))[0].params["Dense_0"]["kernel"]
    assert np.abs(with_penalty - plain).max() > 1e-4


def test_what_is_sown_is_not_state(sown):
    state, _ = sown["fsdp=8"]
    assert {path.split("/")[0] for path in named_leaves(state.model_state)} == {"batch_stats"}
    assert np.abs(state.model_state["batch_stats"]["BatchNorm_0"]["mean"]).max() > 1e-3


def test_evaluation_reads_it_too(sown):
    state, _ = sown["fsdp=8"]
    sums = sl.make_eval_step(sowing_loss)(state, batch())
    np.testing.assert_allclose(sums["losses"].value, sums["intermediates"].value, rtol=1e-5)
    assert float(sums["losses"].value) > 0.5


@pytest.mark.mesh
def test_sow_inside_of_scanned_layers():
    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            x = x + linen.tanh(linen.Dense(16)(x))
            self.sow("losses", "size", jnp.mean(x**2))
            return x, None

    class Deep(linen.Module):
        @linen.compact
        def __call__(self, x):
            layers = linen.scan(
                linen.remat(Layer),
                variable_axes={"params": 0, "losses": 0},
                split_rngs={"params": True},
                length=3,
            )
            return layers(name="layers")(x, None)[0]

    def loss(model, batch, rng):
        error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        (sizes,) = model.variables["losses"]["layers"]["size"]
        assert sizes.shape == (3,)
        return error + 0.1 * jnp.sum(sizes), {"sizes": jnp.sum(sizes)}

    results = [train(Deep(), loss, mesh, inputs=(X,)) for mesh in ("fsdp=8", "data=1")]
    losses = [[metrics["loss"] for metrics in seen] for _, seen in results]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert results[0][0].model_state == {}
    assert losses[0][-1] < losses[0][0]


def test_a_collection_that_only_training_sows_into_is_an_output():
    class Quiet(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(16)(x)
            if not self.is_initializing():
                self.sow("losses", "size", jnp.mean(x**2))
            return x

    def loss(model, batch, rng):
        error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        (size,) = model.variables["losses"]["size"]
        return error, {"size": size}

    _, seen = train(Quiet(), loss, "fsdp=8", inputs=(X,))
    assert all(metrics["size"] > 0 for metrics in seen)


def test_refuses_a_variable_that_a_call_makes():
    class Late(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(16)(x)
            if not self.is_initializing():
                self.variable("ema", "mean", lambda: jnp.zeros(16)).value += x.mean(0)
            return x

    def loss(model, batch, rng):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    with pytest.raises(sl.ShardlibError, match=r"Late added or removed variables: ema/mean.\n  M"):
        train(Late(), loss, "fsdp=8", inputs=(X,))


class Penalty(nnx.Variable):
    """A user's own type for what a module sows."""


class NnxSowing(nnx.Module):
    def __init__(self, rngs):
        self.into = nnx.Linear(16, 32, rngs=rngs)
        self.out_of = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = nnx.tanh(self.into(x))
        self.sow(nnx.Intermediate, "hidden", x)
        self.sow(Penalty, "penalty", jnp.mean(x**2))
        return self.out_of(x)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("kind", [nnx.Intermediate, Penalty])
def test_the_loss_captures_what_nnx_sows(kind):
    def loss(model, batch, rng):
        out, sown = nnx.capture(model, kind)(batch["x"])
        (size,) = (jnp.mean(x**2) if x.ndim else x for x in jax.tree.leaves(sown))
        error = jnp.mean((out - batch["y"]) ** 2)
        return error + 0.1 * size, {"size": size}

    results = [train(NnxSowing, loss, mesh) for mesh in ("fsdp=8", "data=1")]
    sizes = [[metrics["size"] for metrics in seen] for _, seen in results]
    np.testing.assert_allclose(*sizes, rtol=1e-5)
    assert min(sizes[0]) > 0.01
    assert results[0][0].model_state == {}


@pytest.mark.rest("mesh")
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(("kind", "name"), [(nnx.Intermediate, "hidden"), (Penalty, "penalty")])
def test_the_loss_reads_what_nnx_sows_without_a_capture(kind, name):
    def loss(model, batch, rng):
        out = model(batch["x"])
        (size,) = getattr(model, name).get_value()
        return jnp.mean((out - batch["y"]) ** 2), {"size": jnp.mean(size**2)}

    state, seen = train(NnxSowing, loss, "fsdp=8")
    assert all(metrics["size"] > 0 for metrics in seen)
    assert state.model_state == {}
