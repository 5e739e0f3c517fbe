"""What a run saves, and how often."""

from shardlib.config import configclass


@configclass
class CheckpointConfig:
    """When checkpoints are saved and how many are kept."""

    enabled: bool = True
    """Whether the run saves at all; without checkpoints it cannot be resumed."""

    every_steps: int = 1000
    """Steps between two checkpoints. One more is saved at the end and when the run is stopped."""

    keep: int = 3
    """Number of newest checkpoints to keep; older ones are deleted once a newer is complete."""

    asynchronous: bool = True
    """Whether training goes on while files are written, after the copy from device to host."""

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, not {self.every_steps}")
        if self.keep < 1:
            raise ValueError(f"keep must be at least 1, not {self.keep}")
