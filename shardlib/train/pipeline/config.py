"""Pipeline config."""

from typing import Literal

from shardlib.config import configclass


@configclass
class PipelineConfig:
    """The schedule of a pipeline, used if the mesh has a `stage` axis."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """Order of forward and backward turns. 1f1b keeps activations of as many microbatches as there
    are stages; gpipe keeps activations of all microbatches. interleaved has a smaller bubble and
    sends more."""
    chunks_per_stage: int | None = None
    """Chunks of layers on each stage. Null: 2 for interleaved, 1 for the others, which support only
    1."""
    skip_idle: bool | None = None
    """Whether idle stages skip the computation (true) or compute and discard (false). Null: skip,
    except with a context axis, a ring in the model, or CPU devices. There stages send by
    collective-permute, and skipping would hang. Permutes that the compiler inserts for other axes
    are not detected: set it to false if a pipeline hangs."""

    def __post_init__(self):
        chunks = self.chunks_per_stage
        if self.schedule == "interleaved" and chunks is not None and chunks < 2:
            raise ValueError(
                f"chunks_per_stage is {chunks}, but interleaved needs at least 2 of them."
            )
        if self.schedule != "interleaved" and chunks not in (None, 1):
            raise ValueError(
                f"chunks_per_stage is {chunks}, but only interleaved cuts a stage into chunks."
            )

    @property
    def chunks(self) -> int:
        """Number of chunks of layers on each stage."""
        return self.chunks_per_stage or (2 if self.schedule == "interleaved" else 1)
