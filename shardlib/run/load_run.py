"""The model of a run, to use from Python."""

import dataclasses
from typing import Any

from flax import nnx

from shardlib.data import Tokenizer
from shardlib.registry import ModelFamily
from shardlib.run.restore_model import restore_model
from shardlib.sharding.constrain import Scope


@dataclasses.dataclass(frozen=True, eq=False)
class RunModel:
    """A language model that a run has trained."""

    model: nnx.Module
    """The module in evaluation mode, its parameters on their devices."""
    config: Any
    """The config of its family."""
    family: ModelFamily
    tokenizer: Tokenizer
    """The tokenizer that it was trained with."""
    scope: Scope
    """Its mesh and rules."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The token between documents, which ends an answer."""
        return (self.tokenizer.eot,)


def load_run(run_dir: str, *, mesh: str | None = None, step: int | None = None) -> RunModel:
    """Loads the model of a run, which stays unchanged, in the precision that it computes in.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh; default: the run's mesh if it fits the devices, else `auto`.
        step: The checkpoint; default: the newest valid one of all places.

    Raises:
        ConfigError: If the directory holds no run.
        CheckpointError: If the run has no valid checkpoint, or none of `step`.
        MeshError: If the mesh does not fit the devices.
        DataError: If its tokenizer is missing, or not the one that it was trained with.
        ModelError: If it was not trained on text.
    """
    restored = restore_model(run_dir, mesh=mesh, step=step, of_text=True)
    model: Any = restored.model()
    parts = restored.parts
    assert restored.tokenizer is not None, "restore_model refuses models of other data"
    return RunModel(model, model.config, parts.family, restored.tokenizer, parts.scope)
