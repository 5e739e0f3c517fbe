"""Schedules against their closed forms in float64, and what a config makes of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.errors import ConfigError
from shardlib.optim.build import OptimizerConfig, build_schedule

# One float32 rounding per operation, at most 8 operations on values of order 1.
RTOL = 1e-6


def rates(steps=100, global_batch=1, **keys):
    schedule = build_schedule(OptimizerConfig(**keys), steps=steps, global_batch=global_batch)
    values = jax.jit(schedule)(jnp.arange(steps + 1))
    assert values.dtype == jnp.float32
    return np.asarray(values, np.float64)


def closed_form(name, step, *, steps, warmup, peak, low):
    """The definition of each schedule, one step at a time, in plain Python."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    done = (step - warmup) / (steps - warmup)
    if name == "constant":
        return peak
    if name == "linear":
        return peak * (1 + (low - 1) * done)
    if name == "cosine":
        return peak * (low + (1 - low) * (1 + math.cos(math.pi * done)) / 2)
    if name == "wsd":
        last = 0.2 * steps
        return peak * (1 + (low - 1) * max(0.0, (step - (steps - last)) / last))
    drops = sum(step >= round(fraction * steps) for fraction in (1 / 3, 2 / 3, 8 / 9))
    return peak * 0.1**drops


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd", "step"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_closed_form(name, warmup):
    low = 0.25 if name in ("linear", "cosine", "wsd") else 0.1
    keys = {"min_fraction": low} if name in ("linear", "cosine", "wsd") else {}
    got = rates(schedule=name, learning_rate=0.5, warmup_steps=warmup, **keys)
    want = [
        closed_form(name, step, steps=100, warmup=warmup, peak=0.5, low=low) for step in range(101)
    ]
    np.testing.assert_allclose(got, want, rtol=RTOL)


def test_beyond_the_end_the_minimum_is_kept():
    schedule = build_schedule(OptimizerConfig(min_fraction=0.5), steps=10, global_batch=1)
    np.testing.assert_allclose(schedule(jnp.array([10, 11, 10_000])), 0.5 * 3e-4, rtol=RTOL)


def test_linear_scaling_starts_its_warmup_at_the_unscaled_rate():
    got = rates(
        schedule="constant", learning_rate=0.1, base_batch=256, global_batch=1024, warmup_steps=4
    )
    # Goyal et al. 2017, section 2.2: by a constant amount each step from eta to k * eta.
    np.testing.assert_allclose(got[:6], [0.16, 0.22, 0.28, 0.34, 0.4, 0.4], rtol=RTOL)


def test_a_smaller_batch_scales_down_and_warms_up_from_zero():
    got = rates(
        schedule="constant", learning_rate=0.4, base_batch=256, global_batch=64, warmup_steps=3
    )
    np.testing.assert_allclose(got[:5], [0.025, 0.05, 0.075, 0.1, 0.1], rtol=RTOL)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"warmup_steps": 100}, "warmup_steps is 100 but the run has 100 steps.\n  Set optimizer."),
        ({"schedule": "wsd", "warmup_steps": 90}, "wsd .* 90 steps of warm-up .*\n  Shorten"),
        (
            {"schedule": "step", "warmup_steps": 50, "step_boundaries": (0.25, 0.75)},
            "step_boundaries starts at 0.25 of 100 steps, inside the warm-up.*\n  Move the",
        ),
    ],
)
def test_schedules_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        rates(**keys)
