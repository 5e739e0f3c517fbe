"""Updates that would do harm are left out, and a run that keeps failing goes back.

Two halves. Inside of the compiled step (`shardlib.train.spikes`) an update whose loss or gradients
are not finite, or are far above those before, is refused on the devices: parameters, model state
and optimizer state keep their bits, nothing is sent, nobody waits. Outside, `GuardPolicy` reads the
metrics that arrive a step late, counts refused updates in a row, and says when the run shall go
back to a checkpoint and past the data that did it.

Source: Chowdhery et al. 2022, "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311,
section 5.1 (spikes of the loss: go back to a checkpoint from before and skip the batches around
them, which do no harm elsewhere).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from shardlib.config import configclass
from shardlib.errors import DivergedError

SKIPPED = "skipped"
"""The metric that says of a step whether its update was refused: 0 or 1, over groups that train
apart their share."""

_LEAST_WARMUP = 8


@configclass
class SpikeConfig:
    """When a finite loss or gradient norm counts as a spike.

    It does when its robust z-score `(x - median) / (1.4826 * MAD)` over the latest accepted steps
    is above a threshold; MAD is the median of the absolute deviations from the median. Neither is
    moved by the outliers that it is to find, as mean and standard deviation are.
    """

    metric: Literal["loss", "grad_norm"] = "grad_norm"
    """What is watched: the loss, or the norm of the gradients before clipping."""
    threshold: float = 6.0
    """Robust standard deviations above the median from which on a value is a spike."""
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
    """Which updates are refused, and when the run goes back to a checkpoint."""

    nonfinite: Literal["skip", "stop", "off"] = "skip"
    """What a loss or gradient norm of NaN or infinity does. skip: its update is left out, bit for
    bit. stop: so is it, and the run ends. off: it is applied."""
    spike: SpikeConfig | None = None
    """When a finite value is too large to be applied; its update is left out. Null: never."""
    patience: int = 10
    """Refused updates in a row at which the run goes back."""
    rewind: bool = True
    """Whether it goes back to the last healthy checkpoint and skips the data since then; else it
    ends."""
    max_rewinds: int = 3
    """How many times it goes back before it ends."""

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
        """Whether any update can be refused; if not, the step is the one without guards."""
        return self.nonfinite != "off" or self.spike is not None


class Record(Protocol):
    """What is read of a `shardlib.train.loop.StepRecord`."""

    @property
    def step(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


Samples = Callable[[int], tuple[int, int]]
"""Of a step, the first sample of the stream that it read, and the first that it did not."""


class Rewind(NamedTuple):
    """That a run shall go back: from which step, past which samples of its stream, and why."""

    step: int
    end: int
    """The first sample that is not passed over."""
    why: str


class GuardPolicy:
    """Counts refused updates as their metrics arrive, and says what the run shall do.

    Feed it every record in order. Over processes it decides alike, as metrics are alike; those of
    groups that train apart are each process's own, and must be agreed on.

    ```python
    policy.saw(record)
    if policy.rewind:
        ...  # restore a checkpoint saved while `policy.healthy`, move the data on
        policy.rewound()
    ```

    Args:
        config: The guards.
        samples: Which samples a step read that is just over.
    """

    def __init__(self, config: GuardsConfig, samples: Samples):
        self.config = config
        self._samples = samples
        self.rewinds = 0
        """How often the run has gone back."""
        self.rewind: Rewind | None = None
        """That the run shall go back now; until `rewound` is called, whatever the steps that were
        on their way by then do."""
        self._streak = 0
        # The first step of the open streak of refused updates, and its first sample. Not asked for
        # later on: a run that was resumed knows nothing of steps before.
        self._first: tuple[int, int] | None = None
        self.fault: str | None = None
        """What was wrong with the latest step, for the log, or None."""

    @property
    def healthy(self) -> bool:
        """Whether the latest update was applied and the run is not to go back, so that a checkpoint
        now is one to go back to."""
        return self._streak == 0 and self.rewind is None

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs to judge as one that went on, as JSON."""
        return {
            "rewinds": self.rewinds,
            "streak": self._streak,
            "first": self._first,
            "rewind": self.rewind,
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state` returned."""
        self.rewinds = state.get("rewinds", 0)
        first, rewind = state.get("first"), state.get("rewind")
        self._first = tuple(first) if first else None
        # Of a checkpoint that does not say where its streak began, the streak begins anew.
        self._streak = state.get("streak", 0) if first else 0
        self.rewind = Rewind(*rewind) if rewind else None

    def saw(self, record: Record) -> None:
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
                "  Look at these samples, or set train.guards.nonfinite to skip to go on without "
                "their update.",
                record.step,
            )
        if self._streak >= self.config.patience and self.rewind is None:
            if not self.config.rewind or self.rewinds >= self.config.max_rewinds:
                raise DivergedError(self._ended(record.step, end), record.step)
            self.rewind = Rewind(record.step, end, self.fault)

    def rewound(self) -> None:
        """Says that the run has gone back: the streak is over, and one rewind used."""
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


def step_fault(config: GuardsConfig, record: Record) -> str | None:
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


def _nonfinite(record: Record) -> dict[str, float]:
    return {
        name: value
        for name in ("loss", "grad_norm")
        if not math.isfinite(value := record.metrics.get(name, 0.0))
    }
