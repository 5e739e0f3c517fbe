"""Losses of 30 steps, gradients and optimizer state on every mesh against one device's."""

import jax
import numpy as np
import pytest
from equivalence import RELATIVE, assert_leaves_close

CASES = [
    ("transformer", "data=8", 1),
    ("transformer", "fsdp=8", 1),
    ("transformer", "tensor=8", 1),
    ("transformer", "data=2,fsdp=2,tensor=2", 1),
    ("transformer", "data=4,context=2", 1),
    ("transformer", "fsdp=4,tensor=2", 2),
    ("resnet", "data=8", 1),
    ("resnet", "fsdp=8", 1),
    ("resnet", "data=2,fsdp=2,tensor=2", 1),
]


@pytest.fixture
def pair(run, name, mesh, microbatches):
    """A training on a mesh, and the same on one device."""
    return run(name, mesh, microbatches), run(name, "data=1", microbatches, num_devices=1)


@pytest.mark.parametrize(("name", "mesh", "microbatches"), CASES)
def test_losses_of_thirty_steps(pair):
    found, expected = pair
    assert len(found.losses) == 30
    assert expected.losses[-1] != pytest.approx(expected.losses[0], rel=1e-3)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=RELATIVE, atol=0)


@pytest.mark.parametrize(("name", "mesh", "microbatches"), CASES)
def test_gradients_and_state_after_one_step_leaf_by_leaf(pair):
    found, expected = pair
    assert_leaves_close(found.gradients, expected.gradients)
    assert_leaves_close(found.first.opt_state, expected.first.opt_state)
    assert_leaves_close(found.first.model_state, expected.first.model_state)


@pytest.mark.parametrize(("name", "mesh", "microbatches"), CASES)
def test_initial_state_is_equal_bit_for_bit(pair):
    found, expected = pair
    jax.tree.map(
        np.testing.assert_array_equal,
        (found.initial.params, found.initial.model_state, found.initial.opt_state),
        (expected.initial.params, expected.initial.model_state, expected.initial.opt_state),
    )
