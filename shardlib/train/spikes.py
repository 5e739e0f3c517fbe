"""Refusal of updates, decided on the devices inside the compiled step.

Everything here is arithmetic on a few replicated scalars that the step computes anyway. It needs no
communication or waiting, and good and bad steps run the same program.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.train.guards import GuardsConfig, SpikeConfig

_TO_SIGMA = 1.4826
"""Ratio of standard deviation to MAD for a normal distribution: 1 / Phi^-1(3/4)."""
_FLOOR = 1e-4
"""Minimum spread, as a fraction of the median. Nearly equal values have a MAD of about 0, so
rounding errors would count as spikes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpikeWindow:
    """The watched values of the latest accepted steps, replicated on every device.

    It is part of the training state, so that a resumed run decides as an uninterrupted one.
    """

    values: jax.Array
    """float32 [window]; the next value goes to index `accepted % window`."""
    accepted: jax.Array
    """Number of accepted values so far, int32 scalar."""


class Verdict(NamedTuple):
    """Whether an update is applied (bool scalar), and the window after it."""

    good: jax.Array
    window: SpikeWindow | None


def empty_window(guards: GuardsConfig | None) -> SpikeWindow | None:
    """Returns the window of a new state, or None if the guards do not detect spikes."""
    if guards is None or guards.spike is None:
        return None
    return SpikeWindow(jnp.zeros(guards.spike.window, jnp.float32), jnp.zeros((), jnp.int32))


def judge(
    guards: GuardsConfig, window: SpikeWindow | None, loss: jax.Array, grad_norm: jax.Array
) -> Verdict:
    """Returns whether to apply an update, and the window after it.

    Args:
        guards: Conditions under which updates are refused.
        window: Previous values. A refused update does not change them.
        loss: float32 scalar.
        grad_norm: float32 scalar.
    """
    good = jnp.bool_(True)
    if guards.nonfinite != "off":
        # A sum that contains NaN or infinity is not finite, and the norm covers every gradient.
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if guards.spike is None:
        return Verdict(good, window)
    assert window is not None
    value = loss if guards.spike.metric == "loss" else grad_norm
    good &= ~_is_spike(guards.spike, window, value)
    return Verdict(good, _taken_in(window, value, good & jnp.isfinite(value)))


def keep_unless(good: jax.Array, new: Any, old: Any) -> Any:
    """Returns the leaves of `new` if `good`, else the leaves of `old` bit for bit.

    It is a selection and not a branch. It fuses into the in-place update of each element, and keeps
    collectives outside of conditionals.
    """
    return jax.tree.map(lambda n, o: n if n is o else jnp.where(good, n, o), new, old)


def robust_score(value: jax.Array, values: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the distance of `value` above the median in robust standard deviations.

    Args:
        value: Scalar.
        values: [n] float32.
        count: Number of leading `values` that count. If it is 0, the result is NaN.

    Source: Rousseeuw and Croux 1993, "Alternatives to the Median Absolute Deviation", Journal of
    the American Statistical Association 88(424), equation 1.1 (the estimator and its constant);
    Iglewicz and Hoaglin 1993, "How to Detect and Handle Outliers" (the score).
    """
    median = _median(values, count)
    deviation = _median(jnp.abs(values - median), count)
    floor = _FLOOR * jnp.abs(median) + jnp.finfo(jnp.float32).tiny
    return (value - median) / (_TO_SIGMA * deviation + floor)


def _is_spike(config: SpikeConfig, window: SpikeWindow, value: jax.Array) -> jax.Array:
    count = jnp.minimum(window.accepted, window.values.shape[0])
    score = robust_score(value, window.values, count)
    is_judged = jnp.isfinite(value) & (window.accepted >= config.warmup)
    return is_judged & (score > config.threshold)


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    is_there = jnp.arange(values.shape[0]) < count
    ordered = jnp.sort(jnp.where(is_there, values, jnp.inf))
    low, high = jnp.maximum(count - 1, 0) // 2, count // 2
    return ordered[low] / 2 + ordered[high] / 2


def _taken_in(window: SpikeWindow, value: jax.Array, accept: jax.Array) -> SpikeWindow:
    slots = window.values.shape[0]
    is_next = jnp.arange(slots) == window.accepted % slots
    return SpikeWindow(
        jnp.where(accept & is_next, value, window.values),
        window.accepted + accept.astype(jnp.int32),
    )
