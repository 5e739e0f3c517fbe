"""The devices of a run: its processes, virtual CPU devices, compiled programs kept between runs."""

import pathlib

import jax

from shardlib import distributed
from shardlib.cache_root import cache_root
from shardlib.errors import ConfigError
from shardlib.run.config import AUTO, RunConfig


def start_devices(config: RunConfig) -> distributed.ProcessGroup:
    """Joins the group of processes and starts the devices; returns this process's place in it.

    Raises:
        ConfigError: If compiled programs cannot be kept where the config says.
        DistributedError: If the processes do not come together, or do not divide the virtual CPU
            devices.
    """
    group = distributed.initialize()
    if config.train.cpu_devices is not None:
        distributed.local_cpu_devices(config.train.cpu_devices, processes=group.count)
    keep_compiled_programs(config.train.compilation_cache)
    return group


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
