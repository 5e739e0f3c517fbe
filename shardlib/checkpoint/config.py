"""What a run saves, and how often."""

from typing import Literal

from shardlib.config import configclass


@configclass
class KeepBest:
    """Which checkpoints are kept for their metrics."""

    metric: str
    """Name of a metric that is given with each save, such as eval/loss."""

    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest values are the best."""

    count: int = 1
    """Number of best checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")


@configclass
class LocalTier:
    """Frequent checkpoints on a fast disk of this machine, between those of the run directory."""

    directory: str
    """Directory of this run alone on a local disk; every process must see it."""

    every_steps: int = 100
    """Steps between two local checkpoints."""

    keep: int = 1
    """Number of newest local checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {self.every_steps}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, not {self.keep}")


@configclass
class CheckpointConfig:
    """When checkpoints are saved and which are kept: those that any of the keep_ settings keeps."""

    enabled: bool = True
    """Whether the run saves at all; without checkpoints it cannot be resumed."""

    every_steps: int = 1000
    """Steps between two checkpoints. One more is saved at the end and when the run is stopped."""

    keep: int = 3
    """Number of newest checkpoints to keep; older ones are deleted once a newer is complete."""

    keep_every_steps: int | None = None
    """Checkpoints of every multiple of so many steps are kept for good."""

    keep_best: KeepBest | None = None
    """Keeps the checkpoints that are best by a metric as well."""

    asynchronous: bool = True
    """Whether training goes on while files are written, after the copy from device to host."""

    max_failures: int = 3
    """Training stops after so many saves in a row that failed; each one before is told of."""

    local: LocalTier | None = None
    """A second place for more frequent checkpoints; a run goes on from the newest of both."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep", "max_failures"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.keep_every_steps is not None and self.keep_every_steps < 1:
            raise ValueError(f"keep_every_steps must be at least 1, not {self.keep_every_steps}")
        if self.local is not None and self.local.every_steps >= self.every_steps:
            raise ValueError(
                f"local.every_steps is {self.local.every_steps}, but every_steps is "
                f"{self.every_steps}: local checkpoints are the more frequent ones"
            )
