"""The choice of experts and their weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.errors import ModelError
from shardlib.nn.moe import route


@pytest.fixture
def logits():
    return jax.random.normal(jax.random.key(0), (2, 5, 6))


def chosen_by_numpy(scores, k):
    return np.argsort(-np.asarray(scores), axis=-1, kind="stable")[..., :k]


def test_softmax_weights_are_the_softmax_over_the_chosen(logits):
    routing = route(logits, 2)
    expected = chosen_by_numpy(logits, 2)
    np.testing.assert_array_equal(routing.experts, expected)
    picked = np.take_along_axis(np.asarray(logits), expected, axis=-1)
    np.testing.assert_allclose(routing.weights, jax.nn.softmax(picked, axis=-1), rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(routing.weights, axis=-1), 1.0, rtol=1e-6)


def test_without_normalisation_weights_are_probabilities(logits):
    routing = route(logits, 3, normalize=False, scale=2.0)
    expected = np.take_along_axis(
        np.asarray(jax.nn.softmax(logits, axis=-1)), np.asarray(routing.experts), axis=-1
    )
    np.testing.assert_allclose(routing.weights, 2 * expected, rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh(logits):
    bias = jnp.asarray([0.0, 0.0, 0.0, 0.0, 0.0, 10.0])
    routing = route(logits, 2, scores="sigmoid", bias=bias)
    scores = np.asarray(jax.nn.sigmoid(logits))
    expected = chosen_by_numpy(scores + np.asarray(bias), 2)
    np.testing.assert_array_equal(routing.experts, expected)
    assert (routing.experts[..., 0] == 5).all()
    picked = np.take_along_axis(scores, expected, axis=-1)
    np.testing.assert_allclose(
        routing.weights, picked / picked.sum(axis=-1, keepdims=True), rtol=1e-6
    )
    np.testing.assert_allclose(jnp.sum(routing.probabilities, axis=-1), 1.0, rtol=1e-6)


def test_of_equal_scores_the_lower_index_comes_first():
    routing = route(jnp.zeros((1, 1, 4)), 3)
    np.testing.assert_array_equal(routing.experts, [[[0, 1, 2]]])


@pytest.mark.mesh
def test_the_gradient_is_that_of_the_weights_alone(logits):
    def first_weight(logits):
        return jnp.sum(route(logits, 2).weights[..., 0])

    def by_hand(logits):
        top = jnp.sort(logits, axis=-1)[..., ::-1]
        return jnp.sum(jax.nn.sigmoid(top[..., 0] - top[..., 1]))

    gradient, expected = jax.grad(first_weight)(logits), jax.grad(by_hand)(logits)
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


@pytest.mark.parametrize("k", [0, 7])
def test_more_experts_than_there_are_is_refused(logits, k):
    with pytest.raises(ModelError) as caught:
        route(logits, k)
    assert str(caught.value) == (
        f"a token cannot go to {k} of 6 experts.\n  Set experts_per_token to 1 to 6."
    )
