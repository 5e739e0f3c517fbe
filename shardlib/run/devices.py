"""The devices of a run: its processes, virtual CPU devices, compiled programs kept between runs."""

import os
import pathlib

import jax

from shardlib import distributed
from shardlib.cache_root import cache_root
from shardlib.errors import ConfigError
from shardlib.run.config import AUTO, RunConfig

DETERMINISTIC_FLAGS = {
    "xla_gpu_exclude_nondeterministic_ops": "true",
    "xla_gpu_autotune_level": "0",
}
"""What makes a GPU program give the same bits each time it is compiled and run: no kernels with
atomics, and none chosen by timing them. (XLA can also keep such choices in a directory; what it
keeps is not all of them, see openxla/xla issue 37902.)

Source: https://openxla.org/xla/determinism.
"""

_FLAG_VALUES = {"": "true", "1": "true", "True": "true", "False": "false"}


def start_devices(config: RunConfig) -> distributed.ProcessGroup:
    """Joins the group of processes and starts the devices; returns this process's place in it.

    Raises:
        ConfigError: If compiled programs cannot be kept where the config says, or determinism
            cannot be had as XLA_FLAGS stand.
        DistributedError: If the processes do not come together, or do not divide the virtual CPU
            devices.
    """
    if config.deterministic:
        make_deterministic()
    group = distributed.initialize()
    if config.train.cpu_devices is not None:
        distributed.local_cpu_devices(config.train.cpu_devices, processes=group.count)
    keep_compiled_programs(config.train.compilation_cache)
    return group


def make_deterministic() -> str:
    """Lets the same program give the same bits each time, on GPUs too; call before JAX starts.

    GPUs get `DETERMINISTIC_FLAGS` by way of XLA_FLAGS; CPU and TPU need nothing. A program with an
    operation for which GPUs have no such kernel (the gradient of max pooling) does not compile.

    Returns:
        What makes it so, the same each time it is called.

    Raises:
        ConfigError: If XLA_FLAGS hold another value, or JAX runs on GPUs without them already.
    """
    platforms = (jax.config.values["jax_platforms"] or "gpu").split(",")
    if not {"gpu", "cuda", "rocm"} & set(platforms):
        return f"{' and '.join(platforms)} needs nothing more for it"
    flags = deterministic_flags(os.environ.get("XLA_FLAGS", ""))
    if flags != os.environ.get("XLA_FLAGS", ""):
        if _is_running():
            if jax.default_backend() != "gpu":
                return f"{jax.default_backend()} needs nothing more for it"
            raise ConfigError(
                "deterministic: JAX has started its GPUs without the flags for it.\n"
                f"  Set XLA_FLAGS={flags!r} before Python starts."
            )
        os.environ["XLA_FLAGS"] = flags
    return f"XLA_FLAGS are {flags}"


def deterministic_flags(given: str) -> str:
    """Returns XLA_FLAGS with `DETERMINISTIC_FLAGS` in them.

    Args:
        given: XLA_FLAGS as they are: flags, or the path of a file of flags.

    Raises:
        ConfigError: If they hold other values, all of which are named, or are a file.
    """
    if given.strip() and not given.strip().startswith("-"):
        raise ConfigError(
            f"deterministic: XLA_FLAGS name a file, {given.strip()}, to which nothing is added.\n"
            f"  Write the flags into XLA_FLAGS themselves."
        )
    pairs = [flag.lstrip("-").partition("=") for flag in given.split()]
    held = {name: _FLAG_VALUES.get(value, value) for name, _, value in pairs}
    faults = [
        f"--{name}={held[name]}, but it takes {value}"
        for name, value in DETERMINISTIC_FLAGS.items()
        if held.get(name, value) != value
    ]
    if faults:
        raise ConfigError(
            f"deterministic: XLA_FLAGS hold {'; '.join(faults)}.\n"
            "  Remove it from XLA_FLAGS, or leave deterministic out."
        )
    added = [f"--{name}={value}" for name, value in DETERMINISTIC_FLAGS.items() if name not in held]
    return " ".join([*([given] if given else []), *added])


def _is_running() -> bool:
    """Whether JAX has started its devices: then it refuses this setting, also the one it has."""
    try:
        jax.config.update("jax_num_cpu_devices", jax.config.values["jax_num_cpu_devices"])
    except RuntimeError:
        return True
    return False


def keep_compiled_programs(directory: str | None) -> None:
    """Turns on JAX's persistent compilation cache, unless the user has already chosen one.

    Raises:
        ConfigError: If the directory cannot be made.
    """
    if directory is None or jax.config.values["jax_compilation_cache_dir"]:
        return
    path = cache_root() / "compiled" if directory == AUTO else pathlib.Path(directory).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"train.compilation_cache: {path} cannot be made: {error.strerror}.\n"
            "  Set it to a directory that this user may write, or to null to keep nothing."
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
