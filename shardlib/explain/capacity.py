"""How much of a chip's memory a program may use."""

import dataclasses

from shardlib.chips import CHIPS, Chip
from shardlib.explain.gpu_targets import TARGETS

_GIB = 2**30
# What libtpu 0.0.42 says is left of the memory of one device, in the message with which it refuses
# a program: "Ran out of memory on HBM, ... exceeds available HBM (15.75G)".
_TPU_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
# JAX takes its share of a GPU at the start, 75% unless XLA_PYTHON_CLIENT_MEM_FRACTION says
# otherwise. Source: "GPU memory allocation" in the documentation of JAX. The contexts of CUDA, NCCL
# and cuDNN need the rest: 95% leaves them 4 GB of an H100, with which steps have been run.
GPU_DEFAULT_SHARE = 0.75
_GPU_LARGEST_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Memory of one device, in bytes."""

    usable_bytes: int
    """What the buffers of a program may take."""
    total_bytes: int
    note: str = ""
    """What the user has to do to get it, if anything."""

    def default_share_suffices(self, needed_bytes: int) -> bool:
        """Whether JAX has it without being asked."""
        return not self.note or needed_bytes <= GPU_DEFAULT_SHARE * self.total_bytes


def capacity(chip: Chip | None) -> Capacity | None:
    """Returns what a program may use of one device of a chip; None for CPU devices, which share
    the memory of their host."""
    if chip is None:
        return None
    # What the tables say is of the chip that is sold; one with other memory has as much more.
    scale = chip.memory_bytes / CHIPS.get(chip.name, chip).memory_bytes
    if chip.kind == "tpu":
        total = int(chip.memory_bytes_per_device)
        usable = int(_TPU_GIB[chip.name] * _GIB * scale) if chip.name in _TPU_GIB else total
        # Where the 16 GB of the data sheet are 16 GiB.
        return Capacity(usable, max(total, usable))
    known = chip.name in TARGETS
    total = int(TARGETS[chip.name].memory_bytes * scale if known else chip.memory_bytes)
    share = f"{_GPU_LARGEST_SHARE:.2f}".lstrip("0")
    note = (
        f"JAX takes {GPU_DEFAULT_SHARE:.0%} of a GPU's memory unless told otherwise: set "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION={share}"
    )
    return Capacity(int(_GPU_LARGEST_SHARE * total), total, note)
