"""Kernels of one device and their seconds: matmuls, attention, passes over memory.

A kernel that computes for c seconds and moves its operands for m seconds takes (c^p + m^p)^(1/p)
seconds: the slower part hides most of the other, but not all. p = 1.5 follows the bf16 matmuls of
TPU7x from 1024^3 to 32768^3 (AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood) within 15%.
Williams et al. 2009 introduced the two-sided roofline.
"""

from typing import NamedTuple

from shardlib.cost.machine.rates import Rates

_SOFTNESS = 1.5
_FLASH_FORWARD, _FLASH_BACKWARD = 0.84, 2.66
"""Multiples of the forward FLOPs, at the mean rate of both passes: 1 and 2.5 with rates as 1.19 to
0.94."""
FLASH_TIMES = {"flash1": 1.7, "flash": 1.0, "cudnn": 1 / 1.6}
"""Time of the kernels of attention relative to `flash`; see `Software.attention`."""
_SCORES_FORWARD, _SCORES_BACKWARD = 9, 15
"""Bytes that passes over scores in half precision move per pair of positions and head. Forward,
softmax reads and writes (4), and so does dropout with a one-byte mask (5). Backward, softmax reads
two and writes one (6), followed by dropout (5) and the sums of the softmax (4)."""


def roofline(compute: float, memory: float) -> float:
    """Returns the seconds of a kernel from its seconds of compute alone and of memory traffic
    alone."""
    high, low = (compute, memory) if compute > memory else (memory, compute)
    if high == 0:
        return 0.0
    return high * (1 + (low / high) ** _SOFTNESS) ** (1 / _SOFTNESS)


class Product(NamedTuple):
    """Products `[rows, fan_in] x [fan_in, fan_out]` of `groups` groups in one kernel; convolutions
    count likewise."""

    rows: float
    fan_in: float
    fan_out: float
    groups: float
    num_bytes: float
    """Bytes of the operands and results of all groups."""
    width: int = 2
    """Bytes per element of an operand."""
    uneven: bool = False
    """Whether experts share the rows unevenly."""

    @property
    def flops(self) -> float:
        """FLOPs of all groups; a multiply-add is two."""
        return 2.0 * self.rows * self.fan_in * self.fan_out * self.groups

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds of the kernel.

        Dims are padded to the tile of the matrix unit. Rows are not, because there are many. Each
        tile of the result costs `fill` more steps of its sum, to load the first operands and to
        store.
        """
        k, n = padded(self.fan_in, rates.tile), padded(self.fan_out, rates.tile)
        compute = 2 * self.rows * self.groups * (k + rates.fill) * n / rates.flops
        taken = roofline(compute, self.num_bytes / rates.memory) + rates.kernel_seconds
        return taken / rates.grouped if self.uneven else taken


def matmul(
    rows: float,
    fan_in: float,
    fan_out: float,
    *,
    width: int = 2,
    groups: float = 1,
    uneven: bool = False,
) -> Product:
    """Returns products whose operands and results are read and written once."""
    moved = (rows * fan_in + fan_in * fan_out + rows * fan_out) * width * groups
    return Product(rows, fan_in, fan_out, groups, moved, width, uneven)


class Stream(NamedTuple):
    """Passes over memory."""

    num_bytes: float
    exponentials: float = 0.0
    kernels: float = 0.0
    """Kernels whose starts hide behind the traffic of others, in a compiled program."""
    launches: float = 0.0
    """Kernels that each wait for their launch, in a program that is not compiled as a whole."""
    dispatched_bytes: float = 0.0
    """Bytes of rows gathered to experts and back."""
    fresh_bytes: float = 0.0
    """Bytes of memory requested from the system."""

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds of the passes. Kernels that hardly move anything take their start."""
        starts = self.kernels * rates.kernel_seconds
        return (
            roofline(self.num_bytes / rates.memory, starts)
            + self.dispatched_bytes / rates.dispatch
            + self.exponentials * rates.exp_seconds
            + self.launches * rates.kernel_seconds
            + self.fresh_bytes * rates.fresh_seconds
        )


class FusedAttention(NamedTuple):
    """Fused attention over the pairs that the mask leaves.

    Forward takes two matmuls of these FLOPs. Backward takes five (Dao 2023, "FlashAttention-2",
    section 2.3.2), because the scores are recomputed, at about 0.8 of the rate (same paper, figures
    5 and 6). A matrix unit of 128 lanes pads heads to 128.
    """

    forward_flops: float
    head_dim: float
    exponentials: float = 0.0
    backward: bool = False

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds of the kernel."""
        padding = padded(self.head_dim, rates.lanes) / self.head_dim
        passes = _FLASH_BACKWARD if self.backward else _FLASH_FORWARD
        computed = passes * self.forward_flops * padding / rates.flash_flops
        return computed + self.exponentials * rates.exp_seconds


class PagedAttention(NamedTuple):
    """Attention of an inference step to keys and values that lie in pages."""

    flops: float
    num_bytes: float
    """Bytes of the keys and values that are read."""
    head_dim: float

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds of the kernel."""
        padding = padded(self.head_dim, rates.lanes) / self.head_dim
        computed = _FLASH_FORWARD * self.flops * padding / rates.flash_flops
        return roofline(computed, self.num_bytes / rates.memory) + rates.kernel_seconds


class UnfusedAttention(NamedTuple):
    """Attention that writes the scores of all pairs to memory.

    Source: Korthikanti et al. 2022, section 4.1, for what is stored (5 a s^2 b bytes).
    """

    sequences: float
    length: float
    heads: float
    head_dim: float
    width: int = 2
    """Bytes per element."""
    backward: bool = False

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds of its kernels without their launches."""
        heads, length = self.sequences * self.heads, self.length
        groups = heads * (4 if self.backward else 2)
        products = matmul(length, self.head_dim, length, width=self.width, groups=groups)
        moved = _SCORES_BACKWARD if self.backward else _SCORES_FORWARD
        scores = Stream(
            heads * length**2 * moved * self.width / 2,
            exponentials=0.0 if self.backward else heads * length**2,
        )
        return products.seconds(rates) - rates.kernel_seconds + scores.seconds(rates)


Kernel = Product | Stream | FusedAttention | PagedAttention | UnfusedAttention


def padded(size: float, tile: int) -> float:
    """Returns a size rounded up to a multiple of `tile`."""
    return max(-(-size // tile) * tile, tile)
