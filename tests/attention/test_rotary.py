import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.errors import ModelError
from shardlib.nn.attention import RotaryScaling, frequencies, rotate, rotations

DIM = 16


def turned(x, positions):
    return rotate(x, rotations(positions, frequencies(DIM)))


def test_scores_depend_on_distance_alone():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 5, 2, DIM))
    positions = jnp.arange(5)[None]

    def scores(shift):
        q, k = turned(query, positions + shift), turned(key, positions + shift)
        return jnp.einsum("bthd,bshd->bhts", q, k)

    np.testing.assert_allclose(scores(0), scores(100), atol=1e-4)


def test_position_zero_and_lengths_stay():
    x = jax.random.normal(jax.random.key(0), (1, 5, 2, DIM))
    y = turned(x, jnp.arange(5)[None])
    np.testing.assert_array_equal(y[:, 0], x[:, 0])
    np.testing.assert_allclose(jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_the_dtype_stays_and_the_angles_are_exact_at_far_positions():
    x = jnp.ones((1, 1, 1, DIM), jnp.bfloat16)
    y = turned(x, jnp.array([[100_001]]))
    assert y.dtype == jnp.bfloat16
    angle = np.float32(100_001)
    np.testing.assert_allclose(float(y[0, 0, 0, 0]), np.cos(angle) - np.sin(angle), atol=0.01)


def test_scaling_stretches_slow_turns_and_leaves_fast_ones():
    plain, scaled = frequencies(DIM), frequencies(DIM, scaling=RotaryScaling())
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8.0, rtol=1e-6)
    assert np.all(np.diff(scaled) < 0)


def test_odd_heads_have_no_pairs():
    with pytest.raises(
        ModelError, match=r"rotate pairs of dims, but head_dim(.|\n)*\n  Use an even"
    ):
        frequencies(7)
