"""Text sampling from a model during training, or from a checkpoint of a run."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.checkpoint import SavedCheckpoints, open_saved
from shardlib.checkpoint.errors import DamageError
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import flatten
from shardlib.data import Tokenizer
from shardlib.errors import DataError, MeshError, ModelError
from shardlib.functional.precision import precision
from shardlib.optim.ema import EmaState
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.position import no_checkpoint
from shardlib.run.resolve_auto import ResolvedConfig, resolve
from shardlib.run.setup import Setup, make_scope
from shardlib.sharding.constrain import Scope, use
from shardlib.train.local_sgd.outer import merged
from shardlib.train.offload import fetch
from shardlib.train.state import TrainState

Notify = Callable[[str], None]


class Sampler:
    """Continues prompts with the parameters of a state, compiled once for each length.

    Args:
        parts: The run.
        tokenizer: The tokenizer that the model was trained with.

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
        self._tokenizer = tokenizer
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
        # A model may pad its vocabulary beyond the tokenizer's, so that a mesh divides it.
        return self._tokenizer.decode(t for t in new if t < self._tokenizer.vocab_size)

    def trace(self, state: TrainState, prompt: str, *, length: int) -> None:
        """Traces the program of a call with these arguments; the state may be abstract.

        Raises:
            ModelError: If prompt and length exceed the positions of the model.
            RuleError: If an activation cannot be placed.
        """
        key = jax.eval_shape(lambda: jax.random.key(0))
        self._sample.trace(state, self._prompt(prompt), length, np.float32(0), key)

    def _prompt(self, prompt: str) -> np.ndarray:
        """Returns the tokens of one row, after an end-of-text token: int32 [1, n]."""
        return np.asarray([[self._tokenizer.eot, *self._tokenizer.encode(prompt)]], np.int32)


def generate(
    run_dir: str,
    prompt: str = "",
    length: int = 128,
    temperature: float = 0.8,
    seed: int = 0,
    mesh: str | None = None,
    step: int | None = None,
    notify: Notify | None = None,
) -> str:
    """Returns the continuation of a prompt by a checkpoint of a run, which stays unchanged.

    The run may have trained on other devices: its parameters are placed on the available ones. Only
    the arrays needed for sampling are read.

    Args:
        run_dir: Directory of the run.
        prompt: Start of the text; it is not part of the result.
        length: Most tokens to add.
        temperature: 0 takes the likeliest token each time.
        seed: Seed of the sampling.
        mesh: The mesh; default: the run's mesh if it fits the devices, else `auto`.
        step: The checkpoint; default: the newest valid one of all places.
        notify: Called with each skipped checkpoint; by default it is logged.

    Raises:
        ConfigError: If the directory holds no run.
        CheckpointError: If the run has no valid checkpoint, or none of `step`.
        MeshError: If the mesh does not fit the devices.
        ModelError: If its model does not generate text, or prompt and length exceed its positions.
    """
    directory = RunDirectory(run_dir)
    config = directory.config_of_run()
    start_devices(config)
    notify = notify or logging.getLogger(__name__).warning
    saved = open_saved(
        directory.checkpoints, config.checkpoint, notify=notify, owner=directory.identity
    )
    if step is not None:
        saved.manifest(step)
    elif not saved.candidates():
        raise no_checkpoint(run_dir, saved)
    tokenizer = directory.read_tokenizer(config)
    if tokenizer is None:
        raise ModelError(
            f"{run_dir} holds a run of model {config.model.name!r}, which was not trained on "
            "text.\n  Name the run_dir of a language model."
        )
    spec = dataclasses.replace(config.data.spec(), vocab_size=tokenizer.vocab_size)
    run, scope = _resolved(config, mesh)
    parts = run.build(spec, scope)
    sampler = Sampler(parts, tokenizer)
    check_tokenizer = functools.partial(_check_tokenizer, tokenizer, directory.tokenizer_file)
    state = _restored(saved, parts, step, notify, check_tokenizer)
    if state is None:
        raise no_checkpoint(run_dir, saved)
    state = merged(parts.train_step(), state)
    return sampler(state, prompt, length=length, temperature=temperature, seed=seed)


def _restored(
    saved: SavedCheckpoints,
    parts: Setup,
    step: int | None,
    notify: Notify,
    check: Callable[[Manifest], None],
) -> Any:
    """Returns the state that `Sampler` needs, of a step or the newest valid one; None without a
    valid one. `check` gets the manifest of a step before it is read."""
    abstract = parts.abstract
    averages = jax.tree.map(
        lambda node: node if isinstance(node, EmaState) else None,
        abstract.opt_state,
        is_leaf=lambda node: isinstance(node, EmaState),
    )
    needed = dataclasses.replace(abstract, opt_state=averages, spike_window=None)
    target = dataclasses.replace(parts, abstract=needed).saved_state()
    wanted = flatten(target)

    def partial(path: str) -> bool:
        return path not in wanted

    def on_difference(line: str) -> None:
        """Reports nothing: these arrays do not matter for sampling."""

    if step is not None:
        check(saved.manifest(step))
        return saved.restore(step, target, partial=partial, on_difference=on_difference)
    candidates = [(each, place) for place in saved.tiers.values() for each in place.candidates()]
    # The sort is stable: a step in two places is read from the first place.
    for each, place in sorted(candidates, key=lambda candidate: -candidate[0]):
        try:
            check(place.manifest(each))
            return place.restore(each, target, partial=partial, on_difference=on_difference)
        except DamageError as error:
            reason = str(error).splitlines()[0].rstrip(":.")
            notify(f"step {each} does not validate and is skipped: {reason}")
    return None


def _check_tokenizer(tokenizer: Tokenizer, file: pathlib.Path, manifest: Manifest) -> None:
    """Raises `DataError` if a checkpoint was trained with another tokenizer."""
    trained_with = manifest.run.get("data", {}).get("tokenizer")
    if trained_with not in (None, tokenizer.fingerprint):
        raise DataError(
            f"{file} is not the tokenizer that step {manifest.step} was trained "
            f"with: its fingerprint is {tokenizer.fingerprint}, not {trained_with}.\n"
            "  Restore the file, for example from a copy of the run."
        )


def _resolved(config: RunConfig, mesh: str | None) -> tuple[ResolvedConfig, Scope]:
    """Returns the run on the given mesh, or else on its own mesh if it fits the devices."""
    devices = jax.devices()
    run = resolve(config if mesh is None else config.with_mesh(mesh), devices)
    try:
        return run, make_scope(run.config, devices)
    except MeshError:
        if mesh is not None:
            raise
    run = resolve(config.with_mesh(AUTO), devices)
    return run, make_scope(run.config, devices)
