"""Resharding of a run to another mesh: the cost of a restore there, or a copy laid out for it."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from typing import Any

import jax

from shardlib.checkpoint import Manifest, RunCheckpoints, SavedCheckpoints, open_saved
from shardlib.checkpoint.arrays import read_bound
from shardlib.checkpoint.read_plan import HostReads, plan_reads
from shardlib.config import to_dict
from shardlib.errors import ConfigError, MeshError
from shardlib.hardware import parse_cluster
from shardlib.log.events import EVENTS_FILE
from shardlib.log.metrics import METRICS_FILE
from shardlib.mesh import MeshConfig, describe
from shardlib.run.checks import check_config
from shardlib.run.config import RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.position import as_saved, no_checkpoint
from shardlib.run.resolve_auto import resolve
from shardlib.run.setup import Devices, Setup, make_scope, open_source

Notify = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """The cost of restoring a checkpoint onto a mesh.

    Attributes:
        step: The step of the checkpoint.
        saved_on: The mesh at the save.
        mesh: The mesh of the restore.
        num_leaves: Number of arrays in the state.
        state_bytes: Bytes of the whole state.
        hosts: Bytes that each host reads, holds and buffers.
    """

    step: int
    saved_on: str
    mesh: str
    num_leaves: int
    state_bytes: int
    hosts: tuple[HostReads, ...]


@dataclasses.dataclass(frozen=True)
class Resharded:
    """A copy of a run.

    Attributes:
        step: The step of its checkpoint.
        left_out: Settings of the run that the config of the copy lacks.
    """

    step: int
    left_out: tuple[str, ...]


def plan_reshard(
    run_dir: str,
    mesh: str,
    *,
    on: str | None = None,
    step: int | None = None,
    notify: Notify | None = None,
) -> ReshardPlan:
    """Returns the cost of a restore onto a mesh; reads no array, and starts no device.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh, such as `fsdp=4,tensor=2`.
        on: The cluster that holds the mesh, such as `v5p-128`; default: one host.
        step: The checkpoint; default: the newest of all places.
        notify: Called with each skipped entry of the directories; by default it is logged.

    Raises:
        CheckpointError: If the checkpoint does not exist.
        ConfigError: If the directory holds no run.
        MeshError: If the mesh is malformed or does not fit the cluster.
        RuleError: If tensors cannot be placed on it.
    """
    directory = RunDirectory(run_dir)
    config = directory.config_of_run()
    cluster = parse_cluster(on or f"cpu:{_num_devices(mesh)}")
    checkpoints = _saved(directory, config, notify)
    step = _step(run_dir, checkpoints, step)
    manifest = checkpoints.manifest(step)
    parts = _parts(manifest, dataclasses.replace(config, mesh=mesh), cluster)
    targets, chunks = checkpoints.stored(step, parts.saved_state())
    hosts = plan_reads(targets, chunks, num_hosts=cluster.num_hosts, read_bound=read_bound)
    return ReshardPlan(
        step=step,
        saved_on=manifest.run["mesh"],
        mesh=describe(parts.scope.mesh),
        num_leaves=len(targets),
        state_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in targets.values()),
        hosts=tuple(hosts),
    )


def reshard(
    run_dir: str,
    mesh: str,
    to: str,
    *,
    step: int | None = None,
    notify: Notify | None = None,
) -> Resharded:
    """Copies a run into a new directory whose one checkpoint is laid out for another mesh.

    `shardlib train TO` continues the copy; the original run is unchanged. The copy is a separate
    run: it has another id, and no `checkpoint.local`, which belongs to a single run.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh; a machine without accelerators emulates its devices on the CPU.
        to: The new directory, which must not hold a run.
        step: The checkpoint; default: the newest of all places.
        notify: Called with each skipped entry of the directories; by default it is logged.

    Returns:
        The copied step, and the settings that were not copied.

    Raises:
        CheckpointError: If the checkpoint does not exist, or is damaged.
        ConfigError: If the directory holds no run, or the new one holds a run or cannot be written.
        MeshError: If the mesh is malformed or does not fit the devices.
        RuleError: If tensors cannot be placed on it.
    """
    directory = RunDirectory(run_dir)
    config = directory.config_of_run()
    new = RunDirectory(to)
    new.check_writable()
    if new.config_file.exists() or new.checkpoints.exists():
        raise ConfigError(f"{to} already holds a run.\n  Name a directory that does not.")
    train = config.train
    if train.cpu_devices is not None:
        train = dataclasses.replace(train, cpu_devices=_num_devices(mesh))
    checkpoints = _saved(directory, config, notify)
    left_out = () if config.checkpoint.local is None else ("checkpoint.local",)
    own = dataclasses.replace(config.checkpoint, local=None)
    config = dataclasses.replace(config, run_dir=to, mesh=mesh, train=train, checkpoint=own)
    start_devices(config)
    step = _step(run_dir, checkpoints, step)
    manifest = checkpoints.manifest(step)
    parts = _parts(manifest, config, jax.devices())
    state = checkpoints.restore(step, parts.saved_state())
    metadata = {
        **manifest.run,
        "id": new.identify(),
        "config": to_dict(parts.recorded),
        "mesh": describe(parts.scope.mesh),
    }
    with RunCheckpoints(new.checkpoints, own) as copy:
        copy.save(step, state, metadata, metrics=manifest.metrics, wait=True)
    _copy_beside(directory, new, config)
    return Resharded(step, left_out)


def _saved(directory: RunDirectory, config: RunConfig, notify: Notify | None) -> SavedCheckpoints:
    return open_saved(
        directory.checkpoints, config.checkpoint, notify=notify, owner=directory.identity
    )


def _step(run_dir: str, checkpoints: SavedCheckpoints, step: int | None) -> int:
    chosen = checkpoints.latest() if step is None else step
    if chosen is None:
        raise no_checkpoint(run_dir, checkpoints)
    return chosen


def _num_devices(mesh: str) -> int:
    axes = MeshConfig.parse(mesh).axes
    if any(axis.size == -1 for axis in axes):
        raise MeshError(
            f"mesh {mesh!r} leaves a size open, and no cluster gives the number of devices.\n"
            "  Give every size, or name the cluster with --on."
        )
    return math.prod(axis.size for axis in axes)


def _parts(manifest: Manifest, config: RunConfig, devices: Devices) -> Setup:
    """Returns the parts of a run on another mesh, with the state of a checkpoint. The data is read
    only for a checkpoint without a data spec."""
    run = resolve(as_saved(config, manifest), devices)
    scope = check_config(run.config, lambda: make_scope(run.config, devices))
    known: dict[str, Any] | None = manifest.run["data"].get("spec")
    spec = type(config.data.spec())(**known) if known else open_source(config, "train").spec
    return run.build(spec, scope)


def _copy_beside(old: RunDirectory, new: RunDirectory, config: RunConfig) -> None:
    new.write(config, old.read_tokenizer(config))
    # Both files hold the account of the run's time, and the last event may be newer than the rows.
    for name in (METRICS_FILE, EVENTS_FILE):
        if (old.path / name).is_file():
            shutil.copyfile(old.path / name, new.path / name)
