"""The state of a run on another mesh: what a restore there takes, or a copy of the run laid out for
it."""

import dataclasses
import math
import pathlib
import shutil
from typing import Any

import jax

from shardlib.checkpoint import Manifest, RunCheckpoints
from shardlib.checkpoint.arrays import read_bound
from shardlib.checkpoint.read_plan import HostReads, plan_reads
from shardlib.config import to_dict
from shardlib.data import read_tokenizer
from shardlib.errors import CheckpointError, ConfigError, MeshError
from shardlib.hardware import parse_cluster
from shardlib.mesh import MeshConfig, describe
from shardlib.registry import DataSpec
from shardlib.run.config import RunConfig
from shardlib.run.devices import start_devices
from shardlib.run.directory import RunDirectory
from shardlib.run.setup import Devices, Setup, make_scope, open_source, setup
from shardlib.train.metrics import METRICS_FILE


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


def plan_reshard(
    run_dir: str, mesh: str, *, on: str | None = None, step: int | None = None
) -> ReshardPlan:
    """Returns what a restore onto a mesh takes; reads no array, and starts no device.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh, such as `fsdp=4,tensor=2`.
        on: The cluster that holds the mesh, such as `v5p-128`; one host when left out.
        step: The checkpoint; the newest when left out.

    Raises:
        CheckpointError: If there is no such run or checkpoint.
        MeshError: If the mesh is malformed or does not fit the cluster.
        RuleError: If tensors cannot be placed on it.
    """
    directory, config = _run(run_dir)
    cluster = parse_cluster(on or f"cpu:{_num_devices(mesh)}")
    with RunCheckpoints(directory.checkpoints, config.checkpoint) as checkpoints:
        step = _step(checkpoints, step)
        manifest = checkpoints.manifest(step)
        parts = _parts(manifest, dataclasses.replace(config, mesh=mesh), cluster, directory)
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


def reshard(run_dir: str, mesh: str, to: str, *, step: int | None = None) -> int:
    """Copies a run into a new directory whose one checkpoint is laid out for another mesh.

    The copy trains on by `shardlib train TO`; the run itself is left as it is.

    Args:
        run_dir: Directory of the run.
        mesh: The mesh; on a machine without accelerators, of as many virtual CPU devices.
        to: The new directory, which must not hold a run.
        step: The checkpoint; the newest when left out.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: If there is no such run or checkpoint, or it is damaged.
        ConfigError: If the new directory holds a run, or cannot be written.
        MeshError: If the mesh is malformed or does not fit the devices.
        RuleError: If tensors cannot be placed on it.
    """
    directory, config = _run(run_dir)
    new = RunDirectory(to)
    new.check_writable()
    if new.config_file.exists() or new.checkpoints.exists():
        raise ConfigError(f"{to} holds a run already.\n  Name a directory that does not.")
    train = config.train
    if train.cpu_devices is not None:
        train = dataclasses.replace(train, cpu_devices=_num_devices(mesh))
    config = dataclasses.replace(config, run_dir=to, mesh=mesh, train=train)
    start_devices(config)
    with RunCheckpoints(directory.checkpoints, config.checkpoint) as checkpoints:
        step = _step(checkpoints, step)
        manifest = checkpoints.manifest(step)
        parts = _parts(manifest, config, jax.devices(), directory)
        state = checkpoints.restore(step, parts.saved_state())
    metadata = {**manifest.run, "config": to_dict(config), "mesh": describe(parts.scope.mesh)}
    with RunCheckpoints(new.checkpoints, config.checkpoint) as copy:
        copy.save(step, state, metadata, metrics=manifest.metrics, wait=True)
    _copy_beside(directory, new, config)
    return step


def _run(run_dir: str) -> tuple[RunDirectory, RunConfig]:
    directory = RunDirectory(run_dir)
    config = directory.read_config()
    if config is None:
        raise CheckpointError(
            f"{run_dir} holds no run: there is no {directory.config_file.name}.\n"
            "  Name the run_dir of a `shardlib train`."
        )
    return directory, config


def _step(checkpoints: RunCheckpoints, step: int | None) -> int:
    found = checkpoints.latest() if step is None else step
    if found is None:
        raise CheckpointError(
            f"{checkpoints.directory} holds no checkpoint.\n"
            "  Train on with `shardlib train` until it has."
        )
    return found


def _num_devices(mesh: str) -> int:
    axes = MeshConfig.parse(mesh).axes
    if any(axis.size == -1 for axis in axes):
        raise MeshError(
            f"mesh {mesh!r} leaves a size open, and no cluster says how many devices there are.\n"
            "  Give every size, or name the cluster with --on."
        )
    return math.prod(axis.size for axis in axes)


def _parts(manifest: Manifest, config: RunConfig, devices: Devices, at: RunDirectory) -> Setup:
    """Returns the parts of a run on another mesh; its data is not read if it need not be."""
    known: dict[str, Any] | None = manifest.run["data"].get("spec")
    spec = DataSpec(**known) if known else open_source(config, "train").spec
    return setup(config, spec, make_scope(config, devices))


def _copy_beside(old: RunDirectory, new: RunDirectory, config: RunConfig) -> None:
    tokenizer = None
    if old.tokenizer_file.is_file():
        tokenizer = read_tokenizer(old.tokenizer_file, config.data.end_of_text)
    new.write(config, tokenizer)
    metrics = pathlib.Path(old.path, METRICS_FILE)
    if metrics.is_file():
        shutil.copyfile(metrics, new.path / METRICS_FILE)
