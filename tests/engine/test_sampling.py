"""Draws: their distribution, and their independence of other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from shardlib.engine.programs import settings_of
from shardlib.engine.requests import Sampling
from shardlib.engine.sampling import draw

LOGITS = np.log(np.asarray([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))
DRAWS = 20_000

# Settings, and the probabilities that are left.
CASES = {
    "all": (Sampling(temperature=1.0), [0.4, 0.3, 0.15, 0.1, 0.05]),
    "temperature": (Sampling(temperature=0.5), [0.16, 0.09, 0.0225, 0.01, 0.0025]),
    "top_k": (Sampling(temperature=1.0, top_k=2), [0.4, 0.3, 0, 0, 0]),
    "top_p": (Sampling(temperature=1.0, top_p=0.8), [0.4, 0.3, 0.15, 0, 0]),
    "min_p": (Sampling(temperature=1.0, min_p=0.3), [0.4, 0.3, 0.15, 0, 0]),
    "both": (Sampling(temperature=1.0, top_k=3, top_p=0.5), [0.4, 0.3, 0, 0, 0]),
}


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case):
    sampling, shares = CASES[case]
    settings = settings_of([sampling] * DRAWS)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (DRAWS, 5))
    drawn = jax.jit(draw)(logits, settings, jnp.arange(DRAWS, dtype=jnp.int32))
    counts = np.bincount(drawn.tokens, minlength=5)
    shares = np.asarray(shares) / np.sum(shares)
    assert counts[shares == 0].sum() == 0
    kept = shares > 0
    assert stats.chisquare(counts[kept], DRAWS * shares[kept]).pvalue > 1e-3
    np.testing.assert_allclose(drawn.logprobs, LOGITS[drawn.tokens], rtol=1e-5)


def test_a_row_depends_on_its_seed_and_position_alone():
    logits = jax.random.normal(jax.random.key(0), (4, 50))
    seeds = [Sampling(temperature=1.0, seed=n) for n in range(4)]
    at = jnp.asarray([7, 7, 8, 9], jnp.int32)
    drawn = draw(logits, settings_of(seeds), at)
    order = jnp.asarray([2, 0, 3, 1])
    again = draw(logits[order], settings_of([seeds[n] for n in order]), at[order])
    np.testing.assert_array_equal(drawn.tokens[order], again.tokens)
    same = draw(logits, settings_of([seeds[0]] * 4), at)
    assert same.tokens[0] == drawn.tokens[0]


def test_greedy_rows_take_the_likeliest_among_drawn_ones():
    logits = jax.random.normal(jax.random.key(0), (64, 50))
    rows = [Sampling(temperature=5.0 * (n % 2), logprobs=3) for n in range(64)]
    drawn = draw(logits, settings_of(rows), jnp.zeros(64, jnp.int32))
    np.testing.assert_array_equal(drawn.tokens[::2], jnp.argmax(logits, -1)[::2])
    assert (drawn.tokens[1::2] != jnp.argmax(logits, -1)[1::2]).any()
    expected = jax.lax.top_k(jax.nn.log_softmax(logits), 20)
    np.testing.assert_array_equal(drawn.top_tokens, expected[1])
    np.testing.assert_array_equal(drawn.top_logprobs, expected[0])


def test_the_least_temperature_takes_the_likeliest():
    logits = jnp.asarray([[-3.0, 2.0, 5.0, 4.0]])
    drawn = draw(logits, settings_of([Sampling(temperature=1e-39)]), jnp.zeros(1, jnp.int32))
    assert int(drawn.tokens[0]) == 2


@pytest.mark.parametrize("vocab", [5, 128, 300])
def test_greedy_rows_take_the_first_of_the_likeliest(vocab):
    """In blocks of 128 logits, as one that has an equal in a later block, or is not a number."""
    logits = np.random.default_rng(0).integers(-2, 3, (64, vocab)).astype(np.float32)
    logits[0], logits[1, [1, -1]], logits[2, [2, -1]] = -np.inf, np.nan, np.inf
    settings = settings_of([Sampling()] * 64)
    drawn = jax.jit(draw)(logits, settings, jnp.zeros(64, jnp.int32))
    np.testing.assert_array_equal(drawn.tokens, np.argmax(logits, axis=-1))
