"""Steps that are so far too large for their chip that no program of them can be made.

libtpu compiles what does not fit as long as its buffers and addresses stay within what the chip
has; beyond, it gives up. What it needs is then taken from its refusal, and the text from a chip
with more memory: the collectives are the same, the buffers nearly so.
"""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import jax

from shardlib.errors import DoesNotFitError, MeshError
from shardlib.hardware import Cluster, parse_cluster

_LARGER = "v5p"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_REFUSED = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\) exceeds available HBM")


def needed_bytes(lowered: Any, options: dict[str, Any]) -> int | None:
    """Returns what a program needs of each device, as the compiler says when it refuses it for
    that; None where it does not."""
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
        DoesNotFitError: If there is none, or the step exceeds that as well.
    """
    other = _larger(cluster)
    if other is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError, DoesNotFitError):
            return compile_on(other)
    where = cluster.name if cluster is not None else "the device"
    raise DoesNotFitError(
        f"the step does not fit {where}: it needs {needed / 2**30:.1f} GiB on each device, too "
        "much to be compiled.\n"
        "  Take more microbatches, rematerialisation or devices; shardlib plan says which.",
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
