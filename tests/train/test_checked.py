"""A step whose compiled program computes wrong numbers is refused at its first call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError, WrongProgramError

WRONG, RIGHT = "data=2,fsdp=2,tensor=2", "fsdp=8"
INIT = nnx.initializers.lecun_normal()
BATCH = {name: np.ones((64, 64), np.float32) for name in "xy"}


class Chain(nnx.Module):
    """Matmuls cut over fsdp and tensor, of which the compiler permutes the rows: backward, and with
    the axes turned round forward too."""

    def __init__(self, rngs, axes=("embed", "mlp")):
        kernel = nnx.with_partitioning(INIT, axes)
        self.layers = nnx.List(nnx.Linear(64, 64, kernel_init=kernel, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def state_on(mesh, **options):
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        return sl.init_state(functools.partial(Chain, **options), optax.sgd(1e-2), seed=0)


def test_a_wrong_step_is_refused_and_names_what_is_wrong():
    state = state_on(WRONG)
    with pytest.raises(WrongProgramError) as refused:
        sl.make_train_step(loss, constrain="user")(state, BATCH)
    text = str(refused.value)
    assert {fault.code for fault in refused.value.faults} == {"SL205"}
    assert "test_checked.py:" in text
    assert "over data+fsdp" in text
    _, fix = text.split("\n", 1)
    assert fix.startswith("  ")
    assert 'constrain="auto"' in fix
    assert "allow_wrong_numbers=('SL205',)" in fix
    # It took nothing from the state.
    assert not state.step.is_deleted()


@pytest.mark.mesh
def test_an_allowed_fault_runs():
    step = sl.make_train_step(loss, constrain="user", allow_wrong_numbers=("SL205",))
    _, metrics = step(state_on(WRONG), BATCH)
    assert np.isfinite(metrics["loss"])


def test_codes_that_are_not_there():
    with pytest.raises(ModelError, match=r"'SL999'.*SL205.*\n  Name codes"):
        sl.make_train_step(loss, allow_wrong_numbers=("SL999",))
    with pytest.raises(ModelError, match="'rows'"):
        sl.make_eval_step(loss, allow_wrong_numbers=("rows",))


def test_a_sum_of_zeros_counts_nothing_twice():
    """The compiler sums the gradient of an unused weight as one zero times its size."""

    class Unused(nnx.Module):
        def __init__(self, rngs):
            normal = nnx.with_partitioning(nnx.initializers.normal(), ("mlp", "embed"))
            self.used = nnx.Param(normal(rngs.params(), (8, 16)))
            self.unused = nnx.Param(normal(rngs.params(), (16, 16)))

    def scaled(model, batch, rng):
        return jnp.mean((batch["x"] * model.used[...][:1]) ** 2)

    batch = {"x": np.ones((8, 16), np.float32)}
    norms = []
    for mesh, count in (("data=1", 1), ("data=2,tensor=2", 4)):
        with sl.use(sl.make_mesh(mesh, devices=jax.devices()[:count]), sl.rules.STANDARD):
            state = sl.init_state(Unused, optax.sgd(1e-2), seed=0)
        _, metrics = sl.make_train_step(scaled, microbatches=2)(state, batch)
        norms.append(metrics["grad_norm"])
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-6)


@pytest.mark.mesh
def test_a_batch_of_another_dtype_is_another_program():
    def by_dtype(model, batch, rng):
        is_whole = jnp.issubdtype(batch["x"].dtype, jnp.integer)
        return jnp.mean(model.layers[0].bias[...] ** 2) if is_whole else loss(model, batch, rng)

    step = sl.make_train_step(by_dtype, constrain="user")
    state, _ = step(state_on(WRONG), {name: x.astype(np.int32) for name, x in BATCH.items()})
    with pytest.raises(WrongProgramError):
        step(state, BATCH)


@pytest.mark.mesh
def test_an_evaluation_step_is_checked_too():
    assert np.isfinite(sl.make_eval_step(loss)(state_on(WRONG), BATCH)["loss"].value)
    state = state_on(WRONG, axes=("mlp", "embed"))
    with pytest.raises(WrongProgramError, match="SL205"):
        sl.make_eval_step(loss, constrain="user")(state, BATCH)
    step = sl.make_eval_step(loss, constrain="user", allow_wrong_numbers=("SL205",))
    assert np.isfinite(step(state, BATCH)["loss"].value)


def test_a_step_inside_of_another_program_is_left_alone():
    state, step = state_on(WRONG, axes=("mlp", "embed")), sl.make_eval_step(loss)
    assert set(jax.eval_shape(step, state, BATCH)) == {"loss"}
