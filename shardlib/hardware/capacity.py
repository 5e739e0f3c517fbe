"""Usable memory of a chip for a program."""

import dataclasses

from shardlib.hardware.chips import CHIPS, Chip
from shardlib.hardware.xla_targets import TARGETS

_GIB = 2**30
# Available memory of one device by the out-of-memory message of libtpu 0.0.42: "Ran out of memory
# on HBM, ... exceeds available HBM (15.75G)".
_TPU_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
# JAX preallocates a share of a GPU's memory: 75%, or XLA_PYTHON_CLIENT_MEM_FRACTION. Source: "GPU
# memory allocation" in the JAX documentation. The contexts of CUDA, NCCL and cuDNN need the rest:
# 95% leaves them 4 GB of an H100, with which steps have been run.
GPU_DEFAULT_SHARE = 0.75
_GPU_LARGEST_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Memory of one device, in bytes."""

    usable_bytes: int
    """Bytes available for the buffers of a program."""
    total_bytes: int
    note: str = ""
    """Action that the user must take to get `usable_bytes`, if any."""

    def default_share_suffices(self, needed_bytes: int) -> bool:
        """Whether JAX's default share holds the needed bytes."""
        return not self.note or needed_bytes <= GPU_DEFAULT_SHARE * self.total_bytes


def capacity(chip: Chip | None) -> Capacity | None:
    """Returns the memory that a program may use on one device of a chip; None for CPU devices,
    which share the memory of their host."""
    if chip is None:
        return None
    # The tables describe the chip as sold; scale their figures for a chip with other memory.
    scale = chip.memory_bytes / CHIPS.get(chip.name, chip).memory_bytes
    if chip.kind == "tpu":
        total = int(chip.memory_bytes_per_device)
        usable = int(_TPU_GIB[chip.name] * _GIB * scale) if chip.name in _TPU_GIB else total
        # The 16 GB of a data sheet may be 16 GiB.
        return Capacity(usable, max(total, usable))
    has_target = chip.name in TARGETS
    total = int(TARGETS[chip.name].memory_bytes * scale if has_target else chip.memory_bytes)
    share = f"{_GPU_LARGEST_SHARE:.2f}".lstrip("0")
    note = (
        f"JAX takes {GPU_DEFAULT_SHARE:.0%} of a GPU's memory unless told otherwise: set "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}"
    )
    return Capacity(int(_GPU_LARGEST_SHARE * total), total, note)
