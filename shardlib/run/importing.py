"""Import of a folder in the format of Hugging Face as a run with a checkpoint at step 0."""

import dataclasses
import os
import pathlib
import shutil
from typing import Any

import jax

from shardlib.checkpoint import RunCheckpoints
from shardlib.data import MapSource, Tokenizer
from shardlib.data.images.fields import ImageFields
from shardlib.errors import ConfigError
from shardlib.optim.config import OptimizerConfig
from shardlib.run.checks import check_config, check_is_config
from shardlib.run.config import RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.initial import start_state
from shardlib.run.position import NoData, Standing
from shardlib.run.resolve_auto import resolve
from shardlib.run.setup import Setup, make_scope, open_source
from shardlib.runtime import distributed
from shardlib.train.guards import GuardPolicy
from shardlib.train.local_sgd.outer import LocalSGD
from shardlib.train.state import TrainState


def import_model(config: RunConfig, *, reads_data: bool = False, allow_bin: bool = False) -> None:
    """Makes the run of a config, with the weights of `model.init_from` as its step 0.

    Each process reads its own shards. The directory appears when it is complete. Without data, the
    checkpoint holds the weights alone, unless `config.optimizer` is given.

    Args:
        config: The config. `run_dir` must not exist.
        reads_data: Whether `data` is the data to train on. Otherwise the run can be sampled,
            exported and resharded, but not trained.
        allow_bin: As in `shardlib.hf.load`.

    Raises:
        ConfigError: If the directory exists or cannot be written, or the config has faults.
        DataError: If the data or the tokenizer is missing or malformed.
        CheckpointError: If the folder cannot be read or does not fit its config.json.
        MeshError: If the mesh does not fit the devices.
        RuleError: If tensors cannot be placed.
    """
    check_is_config(config)
    out = RunDirectory(config.run_dir)
    _check(config, out)
    start_devices(config)
    own = dataclasses.replace(config.checkpoint, local=None, enabled=True)
    config = dataclasses.replace(config, checkpoint=own)
    if not reads_data:
        config = _for_weights(config)
    run = resolve(config, jax.devices())
    scope = check_config(run.config, lambda: make_scope(run.config, jax.devices()))
    source = open_source(config, "train") if reads_data else _no_data(config)
    parts = run.build(source.spec, scope)
    # Every process names it alike; one that an earlier import has left is replaced.
    partial = RunDirectory(out.path.with_name(f".{out.path.name}.partial"))
    if jax.process_index() == 0:
        shutil.rmtree(partial.path, ignore_errors=True)
        partial.write(parts.recorded, source.tokenizer)
    distributed.barrier("shardlib/import/begun", timeout_seconds=None)
    try:
        _save(parts, start_state(parts, allow_bin=allow_bin), source, partial)
        distributed.barrier("shardlib/import/saved", timeout_seconds=None)
        if jax.process_index() == 0:
            os.rename(partial.path, out.path)
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(partial.path, ignore_errors=True)
    distributed.barrier("shardlib/import/end", timeout_seconds=None)


def _check(config: RunConfig, out: RunDirectory) -> None:
    if os.path.lexists(out.path):
        raise ConfigError(f"{out} exists already.\n  Name a directory that does not.")
    out.check_writable()
    if getattr(config.model, "init_from", None) is None:
        raise ConfigError(
            "model.init_from names no folder to import.\n  Set it to a Hugging Face folder."
        )


def _for_weights(config: RunConfig) -> RunConfig:
    """Returns the config of a run that is not trained."""
    if config.optimizer == OptimizerConfig():
        # Moments would only triple the checkpoint.
        config = dataclasses.replace(config, optimizer=OptimizerConfig(name="sgd", momentum=0.0))
    if isinstance(config.data, ImageFields):
        # The images that come with the project have classes of their own, or captions.
        images = dataclasses.replace(config.data, path=config.model.init_from)
        return dataclasses.replace(config, data=images)
    longest = getattr(config.model, "max_positions", None)
    length = getattr(config.data, "sequence_length", None)
    if longest is None or length is None or length <= longest:
        return config
    # The default length is that of texts to train on, which may be too long for the model.
    data: Any = config.data
    return dataclasses.replace(config, data=dataclasses.replace(data, sequence_length=longest))


def _no_data(config: RunConfig) -> NoData:
    if not hasattr(config.data, "tokenizer"):
        return NoData(config.data.spec(), None)
    tokenizer = _tokenizer(config)
    return NoData(config.data.with_tokenizer(config.data.spec(), tokenizer), tokenizer)


def _tokenizer(config: RunConfig) -> Tokenizer:
    tokenizer = config.data.find_tokenizer()
    if tokenizer is None:
        folder = pathlib.Path(config.model.init_from)
        raise ConfigError(
            f"{folder} has no tokenizer.json, and data.tokenizer is not the path of one.\n"
            "  Add data.tokenizer=PATH."
        )
    return tokenizer


def _save(
    parts: Setup, state: TrainState, source: MapSource | NoData, directory: RunDirectory
) -> None:
    step = parts.train_step()
    saved = step.init(state) if isinstance(step, LocalSGD) else state
    guards = GuardPolicy(parts.config.train.guards, lambda step: (0, 0))
    metadata = Standing().metadata(0, parts, source, guards)
    metadata |= {"id": directory.identity, "save_put_off": False}
    with RunCheckpoints(
        directory.checkpoints, parts.config.checkpoint, owner=directory.identity
    ) as checkpoints:
        checkpoints.save(0, saved, metadata, wait=True)
