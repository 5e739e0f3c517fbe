"""Text sampling from a model during training, or from a checkpoint of a run."""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.data import Tokenizer
from shardlib.data.instruct.fields import ChatFields
from shardlib.errors import ModelError
from shardlib.functional.precision import precision
from shardlib.run.restore_model import Notify, restore_model
from shardlib.run.setup import Setup
from shardlib.sharding.constrain import use
from shardlib.train.offload import fetch
from shardlib.train.state import TrainState


class Sampler:
    """Continues prompts with the parameters of a state, compiled once for each length.

    Raises:
        ModelError: If models of its family do not generate text.
    """

    def __init__(self, parts: Setup, tokenizer: Tokenizer):
        generate = parts.family.generate
        if generate is None:
            raise ModelError(
                f"model {parts.config.model.name!r} does not generate text.\n"
                "  Choose a family that does, such as 'transformer'."
            )
        self._tokenizer, self._data = tokenizer, parts.config.data
        # A prompt has one row, so no mesh axis can divide its batch.
        rules = parts.scope.rules.override(activations={"batch": None})
        policy = precision(parts.config.precision)

        def sample(
            state: TrainState, tokens: jax.Array, length: int, t: jax.Array, key: jax.Array
        ) -> jax.Array:
            with use(parts.scope.mesh, rules):
                module = state.definition.module
                params = policy.cast_params(fetch(parts.best_params(state)), module.float32)
                model = module.merge(params, state.model_state, key)
                return generate(model, tokens, length=length, temperature=t, rng=key)

        replicated = NamedSharding(parts.scope.mesh, PartitionSpec())
        self._sample = jax.jit(sample, static_argnums=2, out_shardings=replicated)

    def __call__(
        self, state: TrainState, prompt: str, *, length: int, temperature: float, seed: int
    ) -> str:
        """Returns a continuation of a prompt, of at most `length` tokens."""
        end, tokens = self._tokenizer.eot, self._prompt(prompt)
        key = jax.random.key(seed)
        drawn = jax.device_get(self._sample(state, tokens, length, np.float32(temperature), key))
        new = [int(token) for token in drawn[0, tokens.shape[1] :]]
        new = new[: new.index(end)] if end in new else new
        return self._data.sampled_text(new, self._tokenizer)

    def trace(self, state: TrainState, prompt: str, *, length: int) -> None:
        """Traces the program of a call with these arguments; the state may be abstract.

        Raises:
            ModelError: If prompt and length exceed the positions of the model.
            RuleError: If an activation cannot be placed.
        """
        key = jax.eval_shape(lambda: jax.random.key(0))
        self._sample.trace(state, self._prompt(prompt), length, np.float32(0), key)

    def _prompt(self, prompt: str) -> np.ndarray:
        """Returns the tokens of one row: int32 [1, n]."""
        return np.asarray([self._data.prompt_tokens(prompt, self._tokenizer)], np.int32)


def generate(
    run_dir: str,
    prompt: str = "",
    length: int = 128,
    temperature: float = 0.8,
    seed: int = 0,
    mesh: str | None = None,
    step: int | None = None,
    notify: Notify | None = None,
    echo: bool = False,
) -> str:
    """Returns the continuation of a prompt by a checkpoint of a run, which stays unchanged.

    A run of `data.kind: chat` reads the prompt as a message of the user, in its chat template, and
    answers it.

    The run may have trained on other devices: its parameters are placed on the available ones. Only
    the arrays needed for sampling are read.

    Args:
        run_dir: Directory of the run.
        prompt: Start of the text, or the message.
        length: Most tokens to add.
        temperature: 0 takes the likeliest token each time.
        seed: Seed of the sampling.
        mesh: The mesh; default: the run's mesh if it fits the devices, else `auto`.
        step: The checkpoint; default: the newest valid one of all places.
        notify: Called with each skipped checkpoint; by default it is logged.
        echo: Whether the result begins with the prompt, unless that is a message.

    Raises:
        ConfigError: If the directory holds no run.
        CheckpointError: If the run has no valid checkpoint, or none of `step`.
        DataError: If the run has no chat template any more, or it refuses the message.
        MeshError: If the mesh does not fit the devices.
        ModelError: If its model does not generate text, or prompt and length exceed its positions.
    """
    restored = restore_model(run_dir, mesh=mesh, step=step, notify=notify, of_text=True)
    assert restored.tokenizer is not None, "restore_model refuses models of other data"
    sampler = Sampler(restored.parts, restored.tokenizer)
    text = sampler(restored.state, prompt, length=length, temperature=temperature, seed=seed)
    is_chat = isinstance(restored.parts.config.data, ChatFields)
    return prompt + text if echo and not is_chat else text
