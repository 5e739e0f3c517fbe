"""The devices of a run: its processes, virtual CPU devices, compiled programs kept between runs."""

import os
import pathlib

import jax

from shardlib import distributed
from shardlib.run.config import RunConfig


def start_devices(config: RunConfig) -> distributed.ProcessGroup:
    """Joins the group of processes and starts the devices; returns this process's place in it.

    Raises:
        DistributedError: If the processes do not come together, or do not divide the virtual CPU
            devices.
    """
    group = distributed.initialize()
    if config.train.cpu_devices is not None:
        distributed.local_cpu_devices(config.train.cpu_devices, processes=group.count)
    keep_compiled_programs(config.train.compilation_cache)
    return group


def keep_compiled_programs(directory: str | None) -> None:
    """Turns on JAX's persistent compilation cache, unless the user has already chosen one."""
    if directory is None or jax.config.jax_compilation_cache_dir:
        return
    path = pathlib.Path(os.path.expanduser(directory))
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
