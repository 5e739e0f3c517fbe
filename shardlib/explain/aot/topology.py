"""Descriptions of the devices of TPU slices and GPU hosts, as compilation targets.

This is the only file that uses `jax.experimental.topologies`.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax

from shardlib.cost.machine.fabric import slice_shape
from shardlib.errors import MeshError, MissingExtraError
from shardlib.hardware import Cluster
from shardlib.hardware.chips import Chip
from shardlib.hardware.xla_targets import TARGETS, target_text

# libtpu queries the machine that it runs on and refuses a second process. Without a TPU there is
# nothing to query or share. One value serves all topologies.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_VM_BOUNDS = (2, 2, 1)
_LOOKS_FOR_NONE = "Start with JAX_PLATFORMS=cpu: JAX then does not look for such a device here."
_OTHER_SIZE = "Name a cluster that the installed compiler knows, such as a smaller one."
_CUDA_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def devices_of(cluster: Cluster) -> list[Any]:
    """Returns the devices of a cluster as compilation targets, in its order of `jax.devices()`.

    TPU and GPU devices are descriptions: programs are compiled for them and never run. CPU devices
    are the devices of this process.

    Raises:
        MissingExtraError: If the compiler of the platform is not installed.
        MeshError: If the cluster does not exist, or JAX has started fewer CPU devices.
    """
    chip = cluster.chip
    if chip is None:
        return _cpu_devices(cluster)
    if chip.kind == "tpu":
        return _tpu_devices(cluster, chip)
    return _gpu_devices(cluster, chip)


def _cpu_devices(cluster: Cluster) -> list[Any]:
    count = cluster.num_devices
    try:  # JAX raises once its backends are initialized.
        if (jax.config.values["jax_num_cpu_devices"] or 0) < count:
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise MeshError(
            f"{cluster.name} needs {count} CPU devices, and JAX has started {len(devices)}.\n"
            f"  Start with JAX_NUM_CPU_DEVICES={count}."
        )
    return devices[:count]


def _tpu_devices(cluster: Cluster, chip: Chip) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise _missing(cluster, "libtpu", "tpu")
    sides = _slice_sides(cluster, chip)
    chips_here = cluster.devices_per_host // chip.devices_per_chip
    in_one = chips_here == cluster.num_chips // cluster.num_slices
    bounds = (*sides, 1, 1)[:3] if in_one else _VM_BOUNDS
    options: dict[str, Any] = {"chips_per_host_bounds": bounds}
    if cluster.num_slices > 1:
        options["num_slices"] = cluster.num_slices
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # One device per chip, as in JAX on v4.
    name = f"{chip.name}:{'x'.join(map(str, sides))}"
    with _imagined_machine():
        return _devices(cluster, platform="tpu", topology_name=name, **options)


@contextlib.contextmanager
def _imagined_machine() -> Iterator[None]:
    """Sets the environment variables that describe a machine to libtpu, and unsets them afterwards.

    Attached TPUs and processes started later must see their own machine.
    """
    unset = [name for name in _TPU_ENVIRONMENT if name not in os.environ]
    os.environ.update({name: _TPU_ENVIRONMENT[name] for name in unset})
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)


def _slice_sides(cluster: Cluster, chip: Chip) -> tuple[int, ...]:
    """Returns the sides of a slice in the order of libtpu: a side of 1 comes last."""
    sides = slice_shape(cluster)
    if ":" not in cluster.name:
        sides = (*(side for side in sides if side > 1), *(side for side in sides if side == 1))
    return (*sides, *[1] * chip.torus_dims)[: max(chip.torus_dims, len(sides))]


def _gpu_devices(cluster: Cluster, chip: Chip) -> list[Any]:
    if not any(importlib.util.find_spec(name) for name in _CUDA_PLUGINS):
        raise _missing(cluster, "the CUDA plugin of JAX", "cuda")
    if chip.name not in TARGETS:
        raise MeshError(
            f"{cluster.name}: the XLA target config of a {chip.full_name} is not recorded.\n"
            f"  Compile for one of {', '.join(TARGETS)}."
        )
    return _devices(
        cluster,
        platform="cuda",
        topology_name=chip.name,
        target_config=target_text(chip),
        # Slices, hosts per slice, GPUs per host.
        topology=f"1x{cluster.num_hosts}x{cluster.devices_per_host}",
    )


def _devices(cluster: Cluster, **options: Any) -> list[Any]:
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(**options).devices)
    # JAX passes on any error of its plugins.
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        fix = _OTHER_SIZE if jax.config.values["jax_platforms"] == "cpu" else _LOOKS_FOR_NONE
        raise MeshError(f"cannot compile for {cluster.name}: {reason}\n  {fix}") from error


def _missing(cluster: Cluster, what: str, extra: str) -> MissingExtraError:
    return MissingExtraError(
        f"compiling for {cluster.name} needs {what}, which is not installed: "
        f"pip install 'shardlib[{extra}]'"
    )
