"""A max-pool does not hide from the check that rows changed their order."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.errors import WrongProgramError


class Net(nn.Module):
    """XLA permutes the rows of the cotangent behind the last pool."""

    @nn.compact
    def __call__(self, x):
        for width in (16, 32, 32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(16)(x.mean((1, 2)))


RULES = sl.rules.STANDARD.override(
    paths={
        "Conv_0/kernel": (None, None, None, "mlp"),
        "Conv_*/kernel": (None, None, "embed", "mlp"),
        "Dense_0/kernel": ("embed", "mlp"),
    }
)
BATCH = {"x": np.ones((16, 32, 32, 3), np.float32), "y": np.zeros(16, np.int32)}


def loss(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def first_step(mesh):
    with sl.use(sl.make_mesh(mesh), RULES):
        state = sl.init_state(Net(), optax.sgd(0.1), inputs=(BATCH["x"],))
        return sl.make_train_step(loss, constrain="user")(state, BATCH)


@pytest.mark.mesh
def test_permuted_rows_behind_pools_are_told():
    if jax.__version_info__ >= (0, 12):  # XLA keeps the order of the rows there.
        assert np.isfinite(first_step("data=2,fsdp=2,tensor=2")[1]["loss"])
        return
    with pytest.raises(WrongProgramError) as refused:
        first_step("data=2,fsdp=2,tensor=2")
    (fault,) = refused.value.faults
    assert fault.code == "SL205"
    assert fault.axes == ("data", "fsdp")
    assert "test_checked_pools.py:" in str(refused.value)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4,tensor=2"])
def test_pools_whose_rows_stay_are_not(mesh):
    _, metrics = first_step(mesh)
    assert np.isfinite(metrics["loss"])
