"""Training in 8 bits gives one device's loss and gradients on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import PROBLEMS

import shardlib as sl
from shardlib.functional.eight_bit import fp8_dot_general, int8_dot_general
from shardlib.functional.precision import Precision
from shardlib.paths import named_leaves

DOTS = {"fp8": fp8_dot_general, "int8": int8_dot_general}
MESHES = ("data=2,fsdp=2,tensor=2", pytest.param("fsdp=8", marks=pytest.mark.soak))
PROBLEM = PROBLEMS["transformer"]


def train(mesh, dot, num_devices=8):
    """Returns the loss of a step and its gradients by path."""
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:num_devices])
    policy = Precision(jnp.float32, jnp.float32, dot)
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.init_state(PROBLEM.make({}), optax.trace(0.0), seed=0, precision=policy)
    step = sl.make_train_step(PROBLEM.loss, precision=policy)
    state, metrics = step(state, PROBLEM.batches()[0])
    return float(metrics["loss"]), jax.device_get(named_leaves(state.opt_state))


@functools.cache
def train_on_one_device(dot):
    return train("data=1", dot, num_devices=1)


@pytest.mark.mesh
@pytest.mark.parametrize("name", [pytest.param("fp8", marks=pytest.mark.soak), "int8"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_the_same_on_every_mesh(mesh, name):
    """Inputs of a product differ by float32 rounding, of which hardly any crosses a step of 8 bits:
    a number that did would show as 1e-3 and more."""
    loss, gradients = train(mesh, DOTS[name])
    expected_loss, expected = train_on_one_device(DOTS[name])
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for path, value in expected.items():
        error = np.linalg.norm(gradients[path] - value)
        assert error <= 1e-5 * np.linalg.norm(value), path
    plain = train_on_one_device(jax.lax.dot_general)[1]
    kernel = "trace/layers/mlp/up/kernel"
    assert np.linalg.norm(plain[kernel] - expected[kernel]) > 1e-3 * np.linalg.norm(plain[kernel])
