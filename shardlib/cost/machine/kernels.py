"""Kernel times of one device: matmuls, attention, passes over memory.

A kernel that computes for c seconds and moves its operands for m seconds takes (c^p + m^p)^(1/p)
seconds: the slower part hides most of the other, but not all. p = 1.5 follows the bf16 matmuls of
TPU7x from 1024^3 to 32768^3 (AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood) within 15%.
Williams et al. 2009 introduced the two-sided roofline.
"""

from shardlib.cost.machine.rates import Rates

_SOFTNESS = 1.5
_FLASH_FORWARD, _FLASH_BACKWARD = 0.84, 2.66
"""Multiples of the forward FLOPs, at the mean rate of both passes: 1 and 2.5 with rates as 1.19 to
0.94."""
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


def matmul(
    rates: Rates, rows: float, fan_in: float, fan_out: float, *, width: int = 2, groups: float = 1
) -> float:
    """Returns the seconds of `groups` products `[rows, fan_in] x [fan_in, fan_out]` in one kernel.

    Each group is one `product`.
    """
    moved = (rows * fan_in + fan_in * fan_out + rows * fan_out) * width
    return groups * product(rates, rows, fan_in, fan_out, moved) + rates.kernel_seconds


def product(rates: Rates, rows: float, fan_in: float, fan_out: float, num_bytes: float) -> float:
    """Returns the seconds of a product `[rows, fan_in] x [fan_in, fan_out]` that moves `num_bytes`,
    in a kernel that has started.

    Dims are padded to the tile of the matrix unit. Rows are not, because there are many. Each tile
    of the result costs `fill` more steps of its sum, to load the first operands and to store.
    """
    k, n = padded(fan_in, rates.tile), padded(fan_out, rates.tile)
    compute = 2 * rows * (k + rates.fill) * n / rates.flops
    return roofline(compute, num_bytes / rates.memory)


def flash_attention(rates: Rates, flops: float, head_dim: float, *, backward: bool) -> float:
    """Returns the seconds of fused attention over the pairs that the mask leaves.

    Forward takes two matmuls of these FLOPs. Backward takes five (Dao 2023, "FlashAttention-2",
    section 2.3.2), because the scores are recomputed, at about 0.8 of the rate (same paper, figures
    5 and 6). A matrix unit of 128 lanes pads heads to 128.

    Args:
        rates: Rates of the device.
        flops: Forward FLOPs of the pairs that the mask leaves.
        head_dim: Size of a head.
        backward: Whether to time the backward pass instead of the forward pass.
    """
    padding = padded(head_dim, rates.lanes) / head_dim
    return (_FLASH_BACKWARD if backward else _FLASH_FORWARD) * flops * padding / rates.flash_flops


def unfused_attention(
    rates: Rates,
    sequences: float,
    length: float,
    heads: float,
    head_dim: float,
    *,
    backward: bool,
    width: int = 2,
) -> float:
    """Returns the seconds of attention that writes the scores of all pairs to memory.

    Source: Korthikanti et al. 2022, section 4.1, for what is stored (5 a s^2 b bytes).
    """
    product = matmul(rates, length, head_dim, length, width=width) - rates.kernel_seconds
    products = sequences * heads * (4 if backward else 2) * product
    scores = sequences * heads * length**2
    moved = scores * (_SCORES_BACKWARD if backward else _SCORES_FORWARD) * width / 2
    softmax = 0.0 if backward else scores * rates.exp_seconds
    return products + moved / rates.memory + softmax


def padded(size: float, tile: int) -> float:
    return max(-(-size // tile) * tile, tile)
