"""Fallback for steps that are too large for the compiler of their chip.

libtpu compiles a step that does not fit as long as its buffers and addresses stay within the range
of the chip. Beyond that it fails. The memory needed is then read from the error message, and the
text is compiled for a chip with more memory: its collectives are the same, its buffers nearly so.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax

from shardlib.errors import DoesNotFitError, MeshError
from shardlib.hardware import Cluster, parse_cluster
from shardlib.humanize import gib

_LARGER = "v5p"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSED = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM")


def needed_bytes(lowered: jax.stages.Lowered, options: dict[str, Any]) -> int | None:
    """Returns the bytes per device in the compiler's out-of-memory error, or None without one."""
    strict = {name: value for name, value in options.items() if "oom" not in name}
    try:
        lowered.compile(compiler_options=strict)
    except jax.errors.JaxRuntimeError as error:
        refused = _REFUSED.search(str(error))
        return int(float(refused[1]) * _UNITS[refused[2]]) if refused else None
    return None


def compile_larger(
    cluster: Cluster | None, needed: int, compile_on: Callable[[Cluster], Any]
) -> Any:
    """Returns the step compiled for a cluster of as many devices with more memory.

    Raises:
        DoesNotFitError: If no such cluster exists, or the step exceeds it as well.
    """
    other = _larger(cluster)
    if other is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError, DoesNotFitError):
            return compile_on(other)
    where = cluster.name if cluster is not None else "the device"
    raise DoesNotFitError(
        f"the step does not fit {where}: it needs {gib(needed)} on each device, too much to "
        "compile.\n"
        "  Use more microbatches, remat or devices; shardlib plan says which.",
        needed_bytes=needed,
    )


def _larger(cluster: Cluster | None) -> Cluster | None:
    chip = cluster.chip if cluster else None
    if cluster is None or chip is None or chip.kind != "tpu" or chip.name == _LARGER:
        return None
    per_slice = cluster.num_devices // cluster.num_slices
    try:
        return parse_cluster(f"{cluster.num_slices}x{_LARGER}-{2 * per_slice}")
    except MeshError:
        return None
