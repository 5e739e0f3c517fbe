"""The model of a run, to use from Python."""

import dataclasses
from typing import Any

from flax import nnx

from shardlib.data import Tokenizer
from shardlib.registry import ModelFamily
from shardlib.run.evaluating import model_of_run
from shardlib.run.served_texts import ServedTexts
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
    texts: ServedTexts
    """How an engine reads and writes texts: framed as in training."""

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
    read = model_of_run(run_dir, mesh=mesh, step=step)
    model: Any = read.model
    assert read.scope is not None, "a run has a mesh"
    texts = ServedTexts.of(read)
    return RunModel(model, model.config, read.family, read.tokenizer, read.scope, texts)
