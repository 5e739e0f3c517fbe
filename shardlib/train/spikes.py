"""Which update is refused, decided on the devices inside of the compiled step.

Everything here is arithmetic on a few replicated scalars that the step computes anyway: no device
sends or waits for anything, and good and bad steps are the same program.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.train.guards import GuardsConfig, SpikeConfig

_TO_SIGMA = 1.4826
"""Standard deviations of a normal distribution in a MAD: 1 / Phi^-1(3/4)."""
_FLOOR = 1e-4
"""Least spread that is assumed, as a part of the median: values that hardly differ have a MAD of
about 0, by which rounding would make spikes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpikeWindow:
    """The watched values of the latest accepted steps; whole on every device.

    It is part of the training state, so that a resumed run judges as one that went on.
    """

    values: jax.Array
    """float32 [window], the one that is replaced next at `accepted % window`."""
    accepted: jax.Array
    """Values taken in so far, int32 scalar."""


class Verdict(NamedTuple):
    """Whether an update is applied (bool scalar), and the window after it."""

    good: jax.Array
    window: SpikeWindow | None


def empty_window(guards: GuardsConfig | None) -> SpikeWindow | None:
    """Returns the window of a new state; None where no spikes are looked for."""
    if guards is None or guards.spike is None:
        return None
    return SpikeWindow(jnp.zeros(guards.spike.window, jnp.float32), jnp.zeros((), jnp.int32))


def judge(
    guards: GuardsConfig, window: SpikeWindow | None, loss: jax.Array, grad_norm: jax.Array
) -> Verdict:
    """Decides about an update.

    Args:
        guards: What is refused.
        window: Values before; a refused update leaves it as it is.
        loss: float32 scalar.
        grad_norm: float32 scalar.
    """
    good = jnp.bool_(True)
    if guards.nonfinite != "off":
        # A sum with NaN or infinity in it is not finite: these two see every gradient.
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if guards.spike is None:
        return Verdict(good, window)
    assert window is not None
    value = loss if guards.spike.metric == "loss" else grad_norm
    good &= ~_is_spike(guards.spike, window, value)
    return Verdict(good, _taken_in(window, value, good & jnp.isfinite(value)))


def keep_unless(good: jax.Array, new: Any, old: Any) -> Any:
    """Returns the leaves of `new`, or those of `old` bit for bit.

    A selection, not a branch: it becomes a part of the update of each element in its own memory,
    and collectives stay outside of conditionals.
    """
    return jax.tree.map(lambda n, o: n if n is o else jnp.where(good, n, o), new, old)


def robust_score(value: jax.Array, values: jax.Array, count: jax.Array) -> jax.Array:
    """Returns how many robust standard deviations `value` lies above the median.

    Args:
        value: Scalar.
        values: [n] float32.
        count: How many of `values`, the first ones, count; NaN results if none do.

    Source: Rousseeuw and Croux 1993, "Alternatives to the Median Absolute Deviation", Journal of
    the American Statistical Association 88(424), equation 1.1 (the estimator and its constant);
    Iglewicz and Hoaglin 1993, "How to Detect and Handle Outliers" (the score made of it).
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
