"""The state at step 0: parameters drawn at random, or read from a folder of Hugging Face."""

import jax
from flax import nnx

from shardlib.finetune import LoraConfig
from shardlib.functional import FunctionalModule, functional
from shardlib.functional.precision import precision
from shardlib.functional.protocol import nested
from shardlib.paths import named_leaves
from shardlib.run.published import check_agrees
from shardlib.run.setup import Setup
from shardlib.train.state import TrainState, materialize


def start_state(parts: Setup) -> TrainState:
    """Returns the state at step 0 of a run, on its shards.

    Raises:
        CheckpointError: If the folder of `model.init_from` cannot be read, or its tensors do not
            fit its config.json.
        ConfigError: If the folder holds another model than the config.
    """
    config = parts.config
    if getattr(config.model, "init_from", None) is None:
        return materialize(parts.abstract, seed=config.seed)
    module = functional(lambda rngs: parts.family.make(config.model, parts.data, rngs))
    params = nested(_read(parts, module))
    if config.finetune is None:
        return materialize(parts.abstract, seed=config.seed, params=params)
    return _adapted(parts, config.finetune, module, params)


def _read(parts: Setup, module: FunctionalModule) -> dict[tuple[str, ...], object]:
    """Returns the parameters of the folder, each on its shards and in the dtype of the run."""
    from shardlib import hf

    found = hf.describe(parts.config.model.init_from, weights=True)
    check_agrees(found, parts.config.model)
    dtypes = precision(parts.config.precision)
    stored = jax.eval_shape(lambda x: dtypes.store(x, module.float32), module.shapes()[0])
    leaves = named_leaves(stored)
    placed = hf.placements(module, parts.scope)
    params = hf.read_params(found, module, placed, lambda path: leaves[path].dtype)
    return {tuple(path.split("/")): leaf for path, leaf in params.items()}


def _adapted(
    parts: Setup, finetune: LoraConfig, module: FunctionalModule, params: object
) -> TrainState:
    """Returns the state of a model with adapters, whose first factors follow from the seed."""
    _, model_state = module.shapes()
    base = module.merge(params, model_state, jax.random.key(0))
    model = finetune.adapted(base, nnx.Rngs(0))
    given = nnx.state(model, nnx.Not(nnx.LoRAParam))
    factors = ("**/lora_a", "**/lora_b")
    return materialize(parts.abstract, seed=parts.config.seed, params=given, fresh=factors)
