"""The state at step 0: parameters drawn at random, or read from a folder of Hugging Face."""

from typing import Any

from shardlib.functional.protocol import nested
from shardlib.paths import named_leaves
from shardlib.run.published import check_agrees
from shardlib.run.setup import Setup
from shardlib.train.state import TrainState, materialize


def start_state(parts: Setup, *, allow_bin: bool = False) -> TrainState:
    """Returns the state at step 0 of a run, on its shards; `allow_bin` as in `hf.load`.

    Raises:
        CheckpointError: If the folder of `model.init_from` cannot be read, or its tensors do not
            fit its config.json.
        ConfigError: If the folder holds another model than the config.
    """
    folder = getattr(parts.config.model, "init_from", None)
    seed = parts.config.seed
    if folder is None:
        return materialize(parts.abstract, seed=seed)
    from shardlib import hf

    found = hf.describe(folder, weights=True)
    check_agrees(found, parts.config.model)
    leaves: Any = named_leaves(parts.abstract.params)
    params = hf.read_params(
        found,
        parts.abstract.definition.module,
        {path: leaf.sharding for path, leaf in leaves.items()},
        lambda path: leaves[path].dtype,
        allow_bin,
    )
    tree = nested({tuple(path.split("/")): leaf for path, leaf in params.items()})
    return materialize(parts.abstract, seed=seed, params=tree)
