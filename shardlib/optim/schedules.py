"""Learning-rate schedules in closed form: warm-up, then decay from the peak.

Every schedule is a pure function of the step, so a resumed run gets the same learning rate, and it
can be recomputed from a step in a metrics file. Step 0 is the first update.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Schedule = Callable[[ArrayLike], jax.Array]
"""Maps a step (integer, any shape) to a learning rate of the same shape, float32."""

Decay = Callable[[jax.Array], jax.Array]
"""Maps steps since the warm-up (float32) to the fraction of the peak that is left."""


def warmup(decay: Decay, *, peak: float, warmup_steps: int, start: float = 0.0) -> Schedule:
    """Returns a schedule that rises linearly from `start` to `peak` and then decays.

    Update `s < warmup_steps` uses `start + (peak - start) * (s + 1) / (warmup_steps + 1)`. The
    first update already moves the parameters, and update `warmup_steps` is the first at `peak`.
    """

    def schedule(step: ArrayLike) -> jax.Array:
        position = jnp.asarray(step).astype(jnp.float32)
        rising = start + (peak - start) * (position + 1) / (warmup_steps + 1)
        return jnp.where(position < warmup_steps, rising, peak * decay(position - warmup_steps))

    return schedule


def constant() -> Decay:
    """Returns a decay that stays at the peak."""
    return jnp.ones_like


def linear(decay_steps: int, min_fraction: float) -> Decay:
    """Returns a linear decay that reaches `min_fraction` after `decay_steps`."""
    return lambda since: 1 - (1 - min_fraction) * jnp.clip(since / decay_steps, 0.0, 1.0)


def cosine(decay_steps: int, min_fraction: float) -> Decay:
    """Returns a half-cosine decay that reaches `min_fraction` after `decay_steps`.

    Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts",
    arXiv:1608.03983, equation 5 with one period.
    """

    def decay(since: jax.Array) -> jax.Array:
        done = jnp.clip(since / decay_steps, 0.0, 1.0)
        return min_fraction + (1 - min_fraction) * 0.5 * (1 + jnp.cos(jnp.pi * done))

    return decay


def warmup_stable_decay(stable_steps: int, decay_steps: int, min_fraction: float) -> Decay:
    """Returns a decay that stays at the peak for `stable_steps` and then falls linearly.

    Source: Hu et al., "MiniCPM", arXiv:2404.06395, section 4 (the schedule); Hägele et al.,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations",
    arXiv:2405.18392, section 3 (the linear cool-down over about a fifth of the run).
    """
    fall = linear(decay_steps, min_fraction)
    return lambda since: fall(since - stable_steps)


def step_decay(boundaries: Sequence[int], factor: float) -> Decay:
    """Returns a decay that multiplies by `factor` at each boundary (steps since the warm-up)."""

    def decay(since: jax.Array) -> jax.Array:
        passed = sum(((since >= boundary).astype(jnp.float32) for boundary in boundaries), 0.0)
        return jnp.asarray(factor, jnp.float32) ** passed

    return decay
