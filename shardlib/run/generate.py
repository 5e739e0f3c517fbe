"""Text sampled from a model: while it trains, or from the newest checkpoint of a run."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.checkpoint import RunCheckpoints
from shardlib.config import load
from shardlib.constrain import use
from shardlib.data import Tokenizer, load_tokenizer
from shardlib.errors import CheckpointError, ModelError
from shardlib.precision import precision
from shardlib.registry import DataSpec
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.setup import Setup, setup
from shardlib.train.state import TrainState

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"


class Sampler:
    """Continues prompts with the parameters of a state, compiled once for each length.

    Args:
        parts: The run; its model family generates text.
        tokenizer: The tokenizer that the model was trained with.
    """

    def __init__(self, parts: Setup, tokenizer: Tokenizer):
        generate = parts.family.generate
        if generate is None:
            raise ModelError(
                f"model {parts.config.model.name!r} does not generate text.\n"
                "  Choose a family that does, such as 'transformer'."
            )
        self._tokenizer = tokenizer
        self._scope = parts.scope
        # A prompt is one row, which no mesh axis divides.
        rules = parts.scope.rules.override(activations={"batch": None, "length": None})
        policy = precision(parts.config.precision)

        def sample(state: TrainState, tokens: jax.Array, length: int, t: Any, key: Any) -> Any:
            with use(parts.scope.mesh, rules):
                params = policy.cast_params(parts.best_params(state))
                model = state.definition.module.merge(params, state.model_state, key)
                return generate(model, tokens, length=length, temperature=t, rng=key)

        replicated = NamedSharding(parts.scope.mesh, PartitionSpec())
        self._sample = jax.jit(sample, static_argnums=2, out_shardings=replicated)

    def __call__(
        self, state: TrainState, prompt: str, *, length: int, temperature: float, seed: int
    ) -> str:
        """Returns the text that continues a prompt, of at most `length` tokens."""
        end = self._tokenizer.eot
        tokens = np.asarray([[end, *self._tokenizer.encode(prompt)]], np.int32)
        temperature = np.float32(temperature)  # type: ignore[assignment]
        key = jax.random.key(seed)
        drawn = jax.device_get(self._sample(state, tokens, length, temperature, key))
        new = [int(token) for token in drawn[0, tokens.shape[1] :]]
        return self._tokenizer.decode(new[: new.index(end)] if end in new else new)


def generate(
    run_dir: str, prompt: str = "", length: int = 128, temperature: float = 0.8, seed: int = 0
) -> str:
    """Returns the continuation of a prompt by the newest checkpoint of a run.

    The run may have trained on another mesh: its parameters are placed on the devices at hand.

    Args:
        run_dir: Directory of the run.
        prompt: What the text starts with; it is not part of the result.
        length: Most tokens to add.
        temperature: 0 takes the likeliest token each time.
        seed: Decides what is sampled.

    Raises:
        CheckpointError: If the directory holds no run, or the run has no checkpoint.
        ModelError: If its model does not generate text, or prompt and length exceed its positions.
    """
    directory = pathlib.Path(run_dir)
    if not (directory / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{run_dir} holds no run: there is no {CONFIG_FILE}.\n"
            "  Name the run_dir of a `shardlib train`."
        )
    config = load(RunConfig, directory / CONFIG_FILE)
    tokenizer = load_tokenizer(config.data)
    start_devices(config)
    with RunCheckpoints(directory / CHECKPOINTS, config.checkpoint) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise CheckpointError(
                f"{run_dir} has no checkpoint yet.\n  Train on with `shardlib train` until it has."
            )
        spec = DataSpec(
            vocab_size=tokenizer.vocab_size, sequence_length=config.data.sequence_length
        )
        here = dataclasses.replace(config, mesh=AUTO)
        parts = setup(here, spec, jax.devices(), check_batch=False)
        state = checkpoints.restore(step, parts.abstract)
    sampler = Sampler(parts, tokenizer)
    return sampler(state, prompt, length=length, temperature=temperature, seed=seed)
