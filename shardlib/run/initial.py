"""The state at step 0: parameters drawn at random, or read from a Hugging Face folder."""

from typing import Any

import jax
from flax import nnx

from shardlib.errors import ConfigError
from shardlib.finetune import LoraConfig
from shardlib.functional import FunctionalModule, functional
from shardlib.functional.precision import precision
from shardlib.functional.protocol import nested
from shardlib.paths import named_leaves
from shardlib.run.published import check_agrees
from shardlib.run.setup import Setup
from shardlib.train.state import TrainState, materialize


def start_state(parts: Setup, *, allow_bin: bool = False) -> TrainState:
    """Returns the state at step 0 of a run, on its shards. `allow_bin` is as in `hf.load`, for the
    folder of `model.init_from`.

    Raises:
        CheckpointError: If the folder of `model.init_from` cannot be read, or its tensors do not
            fit its config.json.
        ConfigError: If the folder holds another model than the config.
    """
    config = parts.config
    if getattr(config.model, "init_from", None) is None:
        return materialize(parts.abstract, seed=config.seed)
    module = functional(lambda rngs: parts.family.make(config.model, parts.data, rngs))
    arrays = _read(parts, module, allow_bin)
    if config.finetune is not None:
        return _adapted(parts, config.finetune, module, arrays)
    # A new head on the encoder of the folder.
    fresh = tuple(path for path in named_leaves(module.shapes()[0]) if path not in arrays)
    return materialize(parts.abstract, seed=config.seed, params=arrays, fresh=fresh, donate=True)


def _read(parts: Setup, module: FunctionalModule, allow_bin: bool) -> dict[str, jax.Array]:
    """Returns the arrays of the folder by path, each on its shards and in the dtype of the run."""
    from shardlib import hf
    from shardlib.hf.dropout import warn_of_lacking

    chosen = parts.config.model
    found = hf.describe(chosen.init_from, weights=True, family=chosen.name)
    check_agrees(found, chosen)
    warn_of_lacking(found, getattr(chosen, "dropout", None))
    dtypes = precision(parts.config.precision)
    stored = jax.eval_shape(lambda x: dtypes.store(x, module.float32), module.shapes()[0])
    leaves = {**named_leaves(module.shapes()[1]), **named_leaves(stored)}
    placed = hf.placements(module, parts.scope, state=True)
    return hf.read_params(found, module, placed, lambda path: leaves[path].dtype, allow_bin)


def _adapted(
    parts: Setup, finetune: LoraConfig, module: FunctionalModule, arrays: dict[str, jax.Array]
) -> TrainState:
    """Returns the state of a model with adapters, whose factors follow from the seed."""
    if lacking := [path for path in named_leaves(module.shapes()[0]) if path not in arrays]:
        raise ConfigError(
            f"model.init_from lacks {', '.join(lacking)}, which finetune would freeze as drawn at "
            "random.\n  Train all parameters first: leave out finetune."
        )
    params, model_state = (
        nested({tuple(path.split("/")): arrays[path] for path in named_leaves(tree)})
        for tree in module.shapes()
    )
    base = module.merge(params, model_state, jax.random.key(0))
    model = finetune.adapted(base, nnx.Rngs(0))
    factors = ("lora_a", "lora_b")
    given = nnx.state(model, lambda path, _: path[-1] not in factors)
    options: Any = {"params": given, "fresh": [f"**/{name}" for name in factors], "donate": True}
    return materialize(parts.abstract, seed=parts.config.seed, **options)
