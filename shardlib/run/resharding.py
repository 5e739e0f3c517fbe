"""The state of a run on another mesh: what a restore there takes, or a copy of the run laid out for
it."""

import dataclasses
import math
import shutil
import uuid
from collections.abc import Callable
from typing import Any

import jax

from shardlib.checkpoint import Manifest, RunCheckpoints, SavedTiers, open_saved
from shardlib.checkpoint.arrays import read_bound
from shardlib.checkpoint.read_plan import HostReads, plan_reads
from shardlib.config import to_dict
from shardlib.data import read_tokenizer
from shardlib.errors import ConfigError, MeshError
from shardlib.hardware import parse_cluster
from shardlib.mesh import MeshConfig, describe
from shardlib.registry import DataSpec
from shardlib.run.checks import check_config
from shardlib.run.config import RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.events import EVENTS_FILE
from shardlib.run.setup import Devices, Setup, make_scope, open_source, setup
from shardlib.run.standing import as_saved, no_checkpoint
from shardlib.train.metrics import METRICS_FILE

Notify = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class ReshardPlan:
    """What restoring a checkpoint onto a mesh takes.

    Attributes:
        step: The step of the checkpoint.
        saved_on: The mesh that it was saved on.
        mesh: The mesh to restore it onto.
        num_leaves: Arrays of the state.
        state_bytes: Bytes of the whole state.
        hosts: What each host reads, holds and buffers.
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
        left_out: Settings of the run that are no longer in the config of the copy.
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
    """Returns what a restore onto a mesh takes; reads no array, and starts no device.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh, such as `fsdp=4,tensor=2`.
        on: The cluster that holds the mesh, such as `v5p-128`; one host when left out.
        step: The checkpoint; the newest of all places when left out.
        notify: Told of what is skipped in the directories; by default it is logged.

    Raises:
        CheckpointError: If there is no such run or checkpoint.
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

    The copy trains on by `shardlib train TO`; the run itself is left as it is. The copy is a run of
    its own: it has another id, and no `checkpoint.local`, which is for one run alone.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh; on a machine without accelerators, of as many virtual CPU devices.
        to: The new directory, which must not hold a run.
        step: The checkpoint; the newest of all places when left out.
        notify: Told of what is skipped in the directories; by default it is logged.

    Returns:
        What was copied, and what of the config was not.

    Raises:
        CheckpointError: If there is no such run or checkpoint, or it is damaged.
        ConfigError: If the new directory holds a run, or cannot be written.
        MeshError: If the mesh is malformed or does not fit the devices.
        RuleError: If tensors cannot be placed on it.
    """
    directory = RunDirectory(run_dir)
    config = directory.config_of_run()
    new = RunDirectory(to)
    new.check_writable()
    if new.config_file.exists() or new.checkpoints.exists():
        raise ConfigError(f"{to} holds a run already.\n  Name a directory that does not.")
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
        "id": _identify(new),
        "config": to_dict(parts.config),
        "mesh": describe(parts.scope.mesh),
    }
    with RunCheckpoints(new.checkpoints, own) as copy:
        copy.save(step, state, metadata, metrics=manifest.metrics, wait=True)
    _copy_beside(directory, new, config)
    return Resharded(step, left_out)


def _saved(directory: RunDirectory, config: RunConfig, notify: Notify | None) -> SavedTiers:
    return open_saved(
        directory.checkpoints, config.checkpoint, notify=notify, owner=directory.identity
    )


def _identify(new: RunDirectory) -> str:
    """Gives a directory an id before it holds a run, which it does once the config is there."""
    identity = uuid.uuid4().hex
    new.path.mkdir(parents=True, exist_ok=True)
    new.identity_file.write_text(f"{identity}\n", encoding="utf-8")
    return identity


def _step(run_dir: str, checkpoints: SavedTiers, step: int | None) -> int:
    found = checkpoints.latest() if step is None else step
    if found is None:
        raise no_checkpoint(run_dir, checkpoints)
    return found


def _num_devices(mesh: str) -> int:
    axes = MeshConfig.parse(mesh).axes
    if any(axis.size == -1 for axis in axes):
        raise MeshError(
            f"mesh {mesh!r} leaves a size open, and no cluster says how many devices there are.\n"
            "  Give every size, or name the cluster with --on."
        )
    return math.prod(axis.size for axis in axes)


def _parts(manifest: Manifest, config: RunConfig, devices: Devices) -> Setup:
    """Returns the parts of a run on another mesh, with the state of a checkpoint; its data is not
    read if it need not be."""
    config = as_saved(config, manifest)
    scope = make_scope(config, devices)
    check_config(config, lambda: scope)
    known: dict[str, Any] | None = manifest.run["data"].get("spec")
    spec = DataSpec(**known) if known else open_source(config, "train").spec
    return setup(config, spec, scope)


def _copy_beside(old: RunDirectory, new: RunDirectory, config: RunConfig) -> None:
    tokenizer = None
    if old.tokenizer_file.is_file():
        tokenizer = read_tokenizer(old.tokenizer_file, config.data.end_of_text)
    new.write(config, tokenizer)
    # The account of the run's time is in both: the last event says whether anything was waited for.
    for name in (METRICS_FILE, EVENTS_FILE):
        if (old.path / name).is_file():
            shutil.copyfile(old.path / name, new.path / name)
