"""Optimizers that evaluate the loss themselves: SAM, line searches, L-BFGS."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError

MESH = "data=2,fsdp=2,tensor=2"
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.standard_normal((16, 8), dtype=np.float32),
    "y": RNG.standard_normal((16, 4), dtype=np.float32),
}


class Model(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.dense = nnx.Linear(8, 4, kernel_init=init, rngs=rngs)

    def __call__(self, x):
        return sl.constrain(self.dense(x), "batch", "mlp")


def loss_fn(model, batch):
    return jnp.mean(jnp.square(jnp.tanh(model(batch["x"])) - batch["y"]))


def start(optimizer, mesh=MESH):
    devices = jax.devices()[:1] if mesh == "data=1" else None
    with sl.use(sl.make_mesh(mesh, devices=devices), sl.rules.STANDARD):
        return sl.init_state(Model, optimizer, seed=0)


def train(optimizer, mesh, steps=6, **options):
    state, losses = start(optimizer, mesh), []
    step = sl.make_train_step(loss_fn, **options)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


def sam(**options):
    return optax.contrib.sam(optax.sgd(0.3), optax.contrib.normalize(), **options)


def ascent():
    return optax.chain(optax.contrib.normalize(), optax.sgd(0.05))


OPTIMIZERS = {
    "sam": lambda: optax.contrib.sam(optax.sgd(0.3), ascent()),
    "sam, opaque": lambda: optax.contrib.sam(optax.sgd(0.3), ascent(), opaque_mode=True),
    "lbfgs": lambda: optax.lbfgs(),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)
    ),
    "polyak": lambda: optax.polyak_sgd(),
    "a chain": lambda: optax.chain(optax.clip(1.0), optax.lbfgs()),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "without a schedule": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.mesh
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_one_device(name):
    expected = train(OPTIMIZERS[name](), "data=1")
    assert expected[0][-1] < expected[0][0]
    found = train(OPTIMIZERS[name](), MESH, microbatches=2)
    # Six steps; a search along a line amplifies what rounding changes.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected
    )


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("sam, opaque", "data=4,fsdp=2", {"reduction": sl.ReductionConfig(dtype="f32")}),
        ("lbfgs", MESH, {"guards": sl.GuardsConfig(nonfinite="skip")}),
    ],
)
def test_so_it_is_over_groups_and_under_guards(name, mesh, options):
    expected = train(OPTIMIZERS[name](), "data=1", 3)
    found = train(OPTIMIZERS[name](), mesh, 3, **options)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected
    )


@pytest.mark.mesh
def test_opaque_sam_by_hand():
    state = start(OPTIMIZERS["sam, opaque"]())
    kernel, bias = jax.device_get((state.params["dense"]["kernel"], state.params["dense"]["bias"]))

    def loss(params):
        return jnp.mean(jnp.square(jnp.tanh(BATCH["x"] @ params[0] + params[1][None]) - BATCH["y"]))

    grads = jax.grad(loss)((kernel, bias))
    norm = optax.tree.norm(grads)
    beyond = jax.tree.map(lambda p, g: p + 0.05 * g / norm, (kernel, bias), grads)
    wanted = jax.tree.map(lambda p, g: p - 0.3 * g, (kernel, bias), jax.grad(loss)(beyond))
    new, _ = sl.make_train_step(loss_fn)(state, BATCH)
    found = new.params["dense"]["kernel"], new.params["dense"]["bias"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_an_optimizer_that_cannot_be_given_what_it_needs():
    with pytest.raises(ModelError, match=r"optimizer \(chain\) cannot be given value.*\n  Put the"):
        train(optax.chain(optax.clip(1.0), OPTIMIZERS["sam"]()), MESH, 1)

    def needs(grads, state, params=None, *, hessian):
        return grads, state

    own = optax.GradientTransformationExtraArgs(lambda params: (), needs)
    with pytest.raises(ModelError, match="missing 1 required keyword-only argument: 'hessian'"):
        train(own, MESH, 1)
