"""Groups that are slower are measured to be."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.train.measure_groups import measure_groups
from shardlib.train.reduce.uneven import balance

pytestmark = pytest.mark.mesh


class Linear(nnx.Module):
    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.dense = nnx.Linear(4, 4, kernel_init=kernel, rngs=rngs)


def slow_loss(model, batch, rng):
    """A device sleeps as long as its rows say, as if it were a slow one."""

    def sleep(seconds):
        time.sleep(float(np.max(seconds)))
        return np.float32(0)

    nothing = jax.pure_callback(
        sleep, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(batch["seconds"])
    )
    return jnp.mean(jnp.square(model.dense(batch["x"]))) + nothing


def start(mesh, num_devices):
    with sl.use(sl.make_mesh(mesh, devices=jax.devices()[:num_devices]), sl.rules.STANDARD):
        return sl.init_state(Linear, optax.sgd(0.1), seed=0)


def test_a_slow_group_is_timed_by_itself():
    seconds = np.repeat(np.float32([0.1, 0.3]), 2)
    batch = {"x": np.ones((4, 4), np.float32), "seconds": seconds}
    found = measure_groups(sl.make_train_step(slow_loss), start("data=2", 2), batch, repeats=2)
    assert found[0] >= 0.1
    assert found[1] >= 0.3
    # The first group is not held up by the second, whatever else the machine does meanwhile.
    assert found[0] < found[1] - 0.05
    assert balance(found, 4) == (3, 1)


def test_groups_of_several_devices_are_timed():
    def loss_fn(model, batch, rng):
        return jnp.mean(jnp.square(model.dense(sl.constrain(batch["x"], "batch", None))))

    batch = {"x": np.ones((8, 4), np.float32)}
    step = sl.make_train_step(loss_fn)
    for mesh, count in (("data=2,fsdp=2,tensor=2", 2), ("fsdp=4,tensor=2", 1)):
        found = measure_groups(step, start(mesh, 8), batch, repeats=1)
        assert len(found) == count
        assert min(found) > 0


def test_rows_and_repeats_are_checked():
    state, step = start("data=2", 2), sl.make_train_step(slow_loss)
    with pytest.raises(ModelError, match="cannot be divided into 2 microbatches"):
        measure_groups(step, state, {"x": np.ones((3, 4), np.float32)})
    with pytest.raises(ModelError, match=r"repeats=0 is not positive.\n  Use 3"):
        measure_groups(step, state, {"x": np.ones((4, 4), np.float32)}, repeats=0)
