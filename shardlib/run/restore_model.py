"""The model of a run, read from a checkpoint onto the available devices."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from shardlib.checkpoint import SavedCheckpoints, open_saved
from shardlib.checkpoint.errors import DamageError
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import flatten
from shardlib.data import Tokenizer
from shardlib.errors import DataError, MeshError, ModelError
from shardlib.functional.precision import precision
from shardlib.optim.ema import EmaState
from shardlib.registry import PAIRS, TEXT, DataSpec
from shardlib.run.config import AUTO, RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.position import no_checkpoint
from shardlib.run.resolve_auto import ResolvedConfig, resolve
from shardlib.run.setup import Setup, make_scope, open_source
from shardlib.sharding.constrain import Scope, use
from shardlib.train.local_sgd.outer import merged
from shardlib.train.offload import fetch
from shardlib.train.state import TrainState

Notify = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class RestoredModel:
    """A model with the parameters of a checkpoint."""

    parts: Setup
    state: TrainState
    """Its optimizer state holds the moving average of the parameters alone, if there is one."""
    tokenizer: Tokenizer | None
    """The tokenizer that it was trained with; None for data other than text."""
    directory: RunDirectory

    def model(self) -> nnx.Module:
        """Returns the module in evaluation mode, in the precision that the run computes in."""
        scope, module = self.parts.scope, self.state.definition.module
        policy = precision(self.parts.config.precision)

        def cast(state: Any) -> Any:
            with use(scope.mesh, scope.rules):
                return policy.cast_params(fetch(self.parts.best_params(state)), module.float32)

        model = module.merge(jax.jit(cast)(self.state), self.state.model_state, jax.random.key(0))
        model.eval()
        return model


def restore_model(
    run_dir: str,
    *,
    mesh: str | None = None,
    step: int | None = None,
    notify: Notify | None = None,
    of_text: bool = False,
) -> RestoredModel:
    """Returns the model of a run, which stays unchanged.

    The run may have trained on other devices: its parameters are placed on the available ones. Only
    the arrays of the model are read.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh; default: the run's mesh if it fits the devices, else `auto`.
        step: The checkpoint; default: the newest valid one of all places.
        notify: Called with each skipped checkpoint; by default it is logged.
        of_text: Whether models of other data than text are refused.

    Raises:
        ConfigError: If the directory holds no run.
        CheckpointError: If the run has no valid checkpoint, or none of `step`.
        MeshError: If the mesh does not fit the devices.
        DataError: If its tokenizer is missing, or not the one that it was trained with.
        ModelError: If the model must be one of text, and is not.
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
    if of_text and tokenizer is None and config.data.gives in (TEXT.name, PAIRS.name):
        raise DataError(
            f"{directory.tokenizer_file} is missing.\n"
            "  Restore the file, for example from a copy of the run."
        )
    if of_text and tokenizer is None:
        raise ModelError(
            f"{run_dir} holds a run of model {config.model.name!r}, which was not trained on "
            "text.\n  Name the run_dir of a language model."
        )
    run, scope = _resolved(config, mesh)
    parts = run.build(_spec(run.config, tokenizer), scope)
    check = functools.partial(_check_tokenizer, tokenizer, directory.tokenizer_file)
    state = _restored(saved, parts, step, notify, check)
    if state is None:
        raise no_checkpoint(run_dir, saved)
    return RestoredModel(parts, merged(parts.train_step(), state), tokenizer, directory)


def _spec(config: RunConfig, tokenizer: Tokenizer | None) -> DataSpec:
    """Returns the data spec of a run, from its data only if nothing else says it."""
    spec = config.data.spec()
    if tokenizer is not None:
        spec = config.data.with_tokenizer(spec, tokenizer)
    unknown = [name for name in config.data.decides if getattr(spec, name) is None]
    is_lost = tokenizer is None and hasattr(config.data, "tokenizer")
    if is_lost or any(getattr(config.model, name, None) is None for name in unknown):
        return open_source(config, "train").spec
    return spec


def _restored(
    saved: SavedCheckpoints,
    parts: Setup,
    step: int | None,
    notify: Notify,
    check: Callable[[Manifest], None],
) -> Any:
    """Returns the state of the model, of a step or the newest valid one; None without a
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
        """Reports nothing: these arrays are not read."""

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


def _check_tokenizer(tokenizer: Tokenizer | None, file: pathlib.Path, manifest: Manifest) -> None:
    """Raises `DataError` if a checkpoint was trained with another tokenizer."""
    if tokenizer is None:
        return
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
    config = config.with_kept_rules()  # New ones would only make a step of training quicker.
    run = resolve(config if mesh is None else config.with_mesh(mesh), devices)
    try:
        return run, make_scope(run.config, devices)
    except MeshError:
        if mesh is not None:
            raise
    run = resolve(config.with_mesh(AUTO), devices)
    return run, make_scope(run.config, devices)
