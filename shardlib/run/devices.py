"""Device setup of a run: processes, virtual CPU devices and the compilation cache."""

import os
import pathlib

import jax

from shardlib.cache_root import cache_root
from shardlib.errors import ConfigError
from shardlib.run.config import AUTO, RunConfig
from shardlib.runtime import distributed

DETERMINISTIC_FLAGS = {
    "xla_gpu_exclude_nondeterministic_ops": "true",
    "xla_gpu_autotune_level": "0",
}
"""XLA flags that make a GPU program give the same bits each time it is compiled and run: no kernels
with atomics, and no autotuning by time. (XLA can also store autotuning results in a directory, but
it does not store all of them, see openxla/xla issue 37902.)

Source: https://openxla.org/xla/determinism.
"""

_FLAG_VALUES = {"": "true", "1": "true", "True": "true", "False": "false"}


def start_devices(config: RunConfig) -> distributed.ProcessGroup:
    """Joins the process group, starts the devices, and returns this process's place in the group.

    Raises:
        ConfigError: If the compilation cache directory cannot be made, or XLA_FLAGS rule out
            determinism.
        DistributedError: If the processes do not connect, or do not divide the virtual CPU
            devices.
    """
    if config.deterministic:
        make_deterministic()
    group = distributed.initialize()
    if config.train.cpu_devices is not None:
        distributed.default_cpu_devices(config.train.cpu_devices, processes=group.count)
    keep_compiled_programs(config.train.compilation_cache)
    return group


def make_deterministic() -> str:
    """Makes programs bitwise deterministic, on GPUs too; call before JAX starts.

    GPUs get `DETERMINISTIC_FLAGS` through XLA_FLAGS; CPU and TPU need nothing. A program with an
    operation that has no deterministic GPU kernel (the gradient of max pooling) does not compile.

    Returns:
        What ensures determinism as text, the same on each call.

    Raises:
        ConfigError: If XLA_FLAGS hold another value, or JAX already runs on GPUs without them.
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
                "deterministic: JAX has already started its GPUs without the required flags.\n"
                f"  Set XLA_FLAGS={flags!r} before Python starts."
            )
        os.environ["XLA_FLAGS"] = flags
    return f"XLA_FLAGS are {flags}"


def deterministic_flags(given: str) -> str:
    """Returns XLA_FLAGS, which are flags or the path of a file of flags, with `DETERMINISTIC_FLAGS`
    added.

    Raises:
        ConfigError: If `given` holds other values (the message names them all) or is a file.
    """
    if given.strip() and not given.strip().startswith("-"):
        raise ConfigError(
            f"deterministic: XLA_FLAGS name a file, {given.strip()}, which is never changed.\n"
            f"  Write the flags into XLA_FLAGS itself."
        )
    pairs = [flag.lstrip("-").partition("=") for flag in given.split()]
    held = {name: _FLAG_VALUES.get(value, value) for name, _, value in pairs}
    faults = [
        f"--{name}={held[name]}, but {value} is required"
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
    """Whether JAX has started its devices; it then rejects another value of this setting."""
    value = jax.config.values["jax_num_cpu_devices"]
    try:
        jax.config.update("jax_num_cpu_devices", value + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", value)
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
            "  Set it to a directory that this user may write, or to null for no cache."
        ) from None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
