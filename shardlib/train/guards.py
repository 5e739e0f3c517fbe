"""Guards that skip harmful updates and rewind a run that keeps failing.

There are two halves. Inside the compiled step, `judge` refuses an update on the devices if its loss
or gradients are not finite or are far above recent values. Parameters, model state and optimizer
state then keep their bits. This is arithmetic on a few replicated scalars that the step computes
anyway: it needs no communication or waiting, and good and bad steps run the same program. Outside,
`GuardPolicy` reads the metrics, which arrive one step late, and counts consecutive refused updates.
It decides when the run goes back to a checkpoint and skips the data that caused them.

Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311,
section 5.1 (loss spikes: restart from an earlier checkpoint and skip the batches around the spike,
which do no harm elsewhere).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from shardlib.config import configclass
from shardlib.errors import DivergedError
from shardlib.train.loop import StepRecord

SKIPPED = "skipped"
"""Name of the metric that is 1 if the update of a step was refused and 0 otherwise. With local SGD
it is the fraction of groups that refused it."""

_LEAST_WARMUP = 8
_TO_SIGMA = 1.4826
"""Ratio of standard deviation to MAD for a normal distribution: 1 / Phi^-1(3/4)."""
_FLOOR = 1e-4
"""Minimum spread, as a fraction of the median. Nearly equal values have a MAD of about 0, so
rounding errors would count as spikes."""


@configclass
class SpikeConfig:
    """Detection of spikes, unusually large finite values of the loss or gradient norm.

    A value is a spike if its robust z-score `(x - median) / (1.4826 * MAD)` over the latest
    accepted steps is above a threshold. MAD is the median absolute deviation from the median.
    Unlike mean and standard deviation, median and MAD are not moved by outliers.
    """

    metric: Literal["loss", "grad_norm"] = "grad_norm"
    """Watched metric: the loss, or the gradient norm before clipping."""
    threshold: float = 6.0
    """Robust standard deviations above the median beyond which a value is a spike."""
    window: int = 128
    """Accepted steps over which the median is taken."""
    warmup: int = 128
    """Accepted steps before the first value is judged."""

    def __post_init__(self) -> None:
        faults = []
        if not 0 < self.threshold < math.inf:
            faults.append(f"threshold must be positive, not {self.threshold}")
        if self.window < _LEAST_WARMUP:
            faults.append(f"window must be at least {_LEAST_WARMUP}, not {self.window}")
        if self.warmup < _LEAST_WARMUP:
            faults.append(f"warmup must be at least {_LEAST_WARMUP}, not {self.warmup}")
        if faults:
            raise ValueError("\n".join(faults))


@configclass
class GuardsConfig:
    """Conditions under which updates are skipped and the run rewinds to a checkpoint."""

    nonfinite: Literal["skip", "stop", "off"] = "skip"
    """Action if the loss or gradient norm is NaN or infinite. skip: skip the update; the state
    keeps its bits. stop: skip it and end the run. off: apply it."""
    spike: SpikeConfig | None = None
    """Detection of spikes, whose updates are skipped. Null: disabled."""
    patience: int = 10
    """Consecutive refused updates after which the run rewinds."""
    rewind: bool = True
    """Whether the run goes back to the last healthy checkpoint and skips the data since then. If
    false, it ends."""
    max_rewinds: int = 3
    """Maximum number of rewinds before the run ends."""

    def __post_init__(self) -> None:
        faults = []
        if self.patience < 1:
            faults.append(f"patience must be at least 1, not {self.patience}")
        if self.max_rewinds < 1:
            faults.append(
                f"max_rewinds must be at least 1, not {self.max_rewinds}; rewind=false never goes "
                "back"
            )
        if faults:
            raise ValueError("\n".join(faults))

    @property
    def refuses(self) -> bool:
        """Whether any update can be refused. If not, the step is compiled without guards."""
        return self.nonfinite != "off" or self.spike is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpikeWindow:
    """The watched values of the latest accepted steps, replicated on every device.

    It is part of the training state, so that a resumed run decides as an uninterrupted one.
    """

    values: Float[Array, " window"]
    """The next value goes to index `accepted % window`."""
    accepted: Int[Array, ""]
    """Number of accepted values so far."""


def empty_window(guards: GuardsConfig | None) -> SpikeWindow | None:
    """Returns the window of a new state, or None if the guards do not detect spikes."""
    if guards is None or guards.spike is None:
        return None
    return SpikeWindow(jnp.zeros(guards.spike.window, jnp.float32), jnp.zeros((), jnp.int32))


def judge(
    guards: GuardsConfig,
    window: SpikeWindow | None,
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
) -> tuple[Bool[Array, ""], SpikeWindow | None]:
    """Returns whether to apply an update, and the window after it. A refused update does not change
    the window."""
    good = jnp.bool_(True)
    if guards.nonfinite != "off":
        # A sum that contains NaN or infinity is not finite, and the norm covers every gradient.
        good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if guards.spike is None:
        return good, window
    assert window is not None
    value = loss if guards.spike.metric == "loss" else grad_norm
    good &= ~_is_spike(guards.spike, window, value)
    return good, _taken_in(window, value, good & jnp.isfinite(value))


def keep_unless(good: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    """Returns the leaves of `new` if `good`, else the leaves of `old` bit for bit.

    It is a selection and not a branch. It fuses into the in-place update of each element, and keeps
    collectives outside of conditionals.
    """
    return jax.tree.map(lambda n, o: n if n is o else jnp.where(good, n, o), new, old)


def robust_score(
    value: Float[Array, ""], values: Float[Array, " window"], count: Int[Array, ""]
) -> Float[Array, ""]:
    """Returns the distance of `value` above the median of the first `count` values in robust
    standard deviations, or NaN if `count` is 0.

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


Samples = Callable[[int], tuple[int, int]]
"""Maps a step to the range of stream samples that it read: first, and one past the last."""


class Rewind(NamedTuple):
    """A request to rewind: the step, the end of the samples to skip, and the reason."""

    step: int
    end: int
    """The first sample that is not skipped."""
    why: str


class GuardPolicy:
    """Counts refused updates as their metrics arrive, and decides when the run rewinds.

    Feed it every record in order. All processes decide alike because their metrics are equal. With
    local SGD each process has the metrics of its own groups, so processes must agree on them first.

    ```python
    policy.saw(record)
    if policy.rewind:
        ...  # restore a checkpoint saved while `policy.healthy`, move the data on
        policy.rewound()
    ```

    Args:
        config: The guards.
        samples: Returns the samples that a step read. Called right after the step.
    """

    def __init__(self, config: GuardsConfig, samples: Samples):
        self.config = config
        self._samples = samples
        self.rewinds = 0
        """Number of rewinds so far."""
        self.rewind: Rewind | None = None
        """The pending rewind, or None. It stays until `rewound` is called, whatever the steps in
        flight do."""
        self._streak = 0
        # First step and first sample of the current streak of refused updates. They are recorded
        # at once, because a resumed run cannot look up samples of earlier steps.
        self._first: tuple[int, int] | None = None
        self.fault: str | None = None
        """Reason why the latest step was refused, for the log, or None."""

    @property
    def healthy(self) -> bool:
        """Whether the latest update was applied and no rewind is pending, so that a checkpoint
        saved at this point is safe to rewind to."""
        return self._streak == 0 and self.rewind is None

    def state(self) -> dict[str, Any]:
        """Returns the state as JSON, so that a resumed run decides as an uninterrupted one."""
        return {
            "rewinds": self.rewinds,
            "streak": self._streak,
            "first": self._first,
            "rewind": self.rewind,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self.rewinds = state.get("rewinds", 0)
        first, rewind = state.get("first"), state.get("rewind")
        self._first = tuple(first) if first else None
        # The streak restarts if the checkpoint does not record where it began.
        self._streak = state.get("streak", 0) if first else 0
        self.rewind = Rewind(*rewind) if rewind else None

    def saw(self, record: StepRecord) -> None:
        """Takes in the metrics of a step.

        Raises:
            DivergedError: If the run shall end: a value that is not finite with `nonfinite: stop`,
                or `patience` refused updates in a row with no rewind left.
        """
        self.fault = step_fault(self.config, record)
        if self.fault is None:
            self._streak, self._first = 0, None
            return
        begin, end = self._samples(record.step)
        if self._first is None:
            self._first = record.step, begin
        self._streak += 1
        if self.config.nonfinite == "stop" and _nonfinite(record):
            raise DivergedError(
                f"step {record.step}: {self.fault} on samples {begin} to {end - 1}; "
                "train.guards.nonfinite is stop.\n"
                "  Inspect these samples, or set train.guards.nonfinite=skip to continue without "
                "their update.",
                record.step,
            )
        if self._streak >= self.config.patience and self.rewind is None:
            if not self.config.rewind or self.rewinds >= self.config.max_rewinds:
                raise DivergedError(self._ended(record.step, end), record.step)
            self.rewind = Rewind(record.step, end, self.fault)

    def rewound(self) -> None:
        """Records that the run has gone back, which ends the streak and uses up one rewind."""
        self.rewinds += 1
        self._streak, self._first, self.fault, self.rewind = 0, None, None, None

    def _ended(self, step: int, end: int) -> str:
        assert self._first is not None
        first, begin = self._first
        why = (
            f"it went back {self.rewinds} times before, as often as train.guards.max_rewinds allows"
            if self.config.rewind
            else "train.guards.rewind is off"
        )
        spikes = ", raise train.guards.spike.threshold" if self.config.spike is not None else ""
        return (
            f"step {step}: {self.fault}; all {self._streak} updates from step {first} on were "
            f"refused on samples {begin} to {end - 1}, and {why}.\n"
            f"  Lower optimizer.learning_rate{spikes}, or begin anew without these samples."
        )


def step_fault(config: GuardsConfig, record: StepRecord) -> str | None:
    """Returns why the update of a step was refused, such as `loss is nan`, or None."""
    share = record.metrics.get(SKIPPED, 0.0)
    if not share:
        return None
    where = f", in {share:.0%} of the groups" if share < 1 else ""
    wrong = _nonfinite(record) if config.nonfinite != "off" else {}
    if not wrong and config.spike is not None:
        name = config.spike.metric
        return f"{name} is {record.metrics[name]:.4g}, a spike{where}"
    return " and ".join(f"{name} is {value}" for name, value in wrong.items()) + where


def _nonfinite(record: StepRecord) -> dict[str, float]:
    return {
        name: value
        for name in ("loss", "grad_norm")
        if not math.isfinite(value := record.metrics.get(name, 0.0))
    }
