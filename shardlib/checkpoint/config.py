"""Config of checkpoints: how often a run saves and which checkpoints it keeps."""

from typing import Literal

from shardlib.config import configclass


def _check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


@configclass
class KeepBest:
    """The checkpoints that are kept for their metrics."""

    metric: str
    """Name of a metric that is passed with each save, such as eval/loss."""

    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value is best."""

    count: int = 1
    """Number of best checkpoints to keep."""

    def __post_init__(self) -> None:
        _check_positive(self, "count")


@configclass
class LocalTier:
    """Frequent checkpoints on a fast local disk, in addition to the run directory's."""

    directory: str
    """Directory on a local disk, used by this run only; every process must see it."""

    every_steps: int = 100
    """Steps between two local checkpoints."""

    keep: int = 1
    """Number of newest local checkpoints to keep."""

    def __post_init__(self) -> None:
        _check_positive(self, "every_steps", "keep")


@configclass
class CheckpointConfig:
    """The schedule and retention of checkpoints; one stays if any `keep_*` setting keeps it."""

    enabled: bool = True
    """Whether the run saves checkpoints; without them it cannot be resumed."""

    every_steps: int = 1000
    """Steps between two checkpoints. The run also saves at its end and when it is stopped."""

    keep: int = 3
    """Number of newest checkpoints to keep; older ones are deleted once a newer one is complete."""

    keep_every_steps: int | None = None
    """Checkpoints at multiples of this many steps are kept for good."""

    keep_best: KeepBest | None = None
    """Also keeps the best checkpoints by a metric."""

    asynchronous: bool = True
    """Whether training continues while files are written, after the copy from device to host."""

    max_failures: int = 3
    """Consecutive failed saves after which training stops; earlier failures are only reported."""

    local: LocalTier | None = None
    """A second place for more frequent checkpoints; a run resumes from the newest of both."""

    def __post_init__(self) -> None:
        _check_positive(self, "every_steps", "keep", "max_failures", "keep_every_steps")
        if self.local is not None and self.local.every_steps >= self.every_steps:
            raise ValueError(
                f"local.every_steps is {self.local.every_steps}, but every_steps is "
                f"{self.every_steps}: local checkpoints must be more frequent"
            )
