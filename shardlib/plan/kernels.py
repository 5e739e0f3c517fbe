"""Time of what one device computes: matmuls, attention, passes over memory.

Of a kernel that computes for c seconds and moves its operands for m seconds, the slower hides most
of the other but not all: it takes (c^p + m^p)^(1/p) seconds. p = 1.5 follows the bf16 matmuls of
TPU7x from 1024^3 to 32768^3 (AI-Hypercomputer/tpu-recipes, microbenchmarks/ironwood) within 15%.
The two-sided roofline is that of Williams et al. 2009.
"""

from shardlib.plan.rates import Rates

_SOFTNESS = 1.5
_FLASH_FORWARD, _FLASH_BACKWARD = 0.84, 2.66
"""Of the forward FLOPs at the mean rate of both: 1 and 2.5 with rates as 1.19 to 0.94."""
_SCORES_FORWARD, _SCORES_BACKWARD = 9, 15
"""Bytes for each pair of positions and head that passes over scores in half precision move:
softmax reads and writes (4), dropout likewise, with a mask of one byte (5); backward softmax reads
two and writes one (6), dropout (5), the sums of the softmax (4)."""


def roofline(compute: float, memory: float) -> float:
    """Returns seconds of a kernel from the seconds of either resource alone."""
    high, low = (compute, memory) if compute > memory else (memory, compute)
    if high == 0:
        return 0.0
    return high * (1 + (low / high) ** _SOFTNESS) ** (1 / _SOFTNESS)


def matmul(
    rates: Rates, rows: float, fan_in: float, fan_out: float, *, width: int = 2, groups: float = 1
) -> float:
    """Returns seconds of `groups` products `[rows, fan_in] x [fan_in, fan_out]` in one kernel.

    See `product`, of which each group is one.
    """
    moved = (rows * fan_in + fan_in * fan_out + rows * fan_out) * width
    return groups * product(rates, rows, fan_in, fan_out, moved) + rates.kernel_seconds


def product(rates: Rates, rows: float, fan_in: float, fan_out: float, num_bytes: float) -> float:
    """Returns seconds of a product `[rows, fan_in] x [fan_in, fan_out]` that moves `num_bytes`, of
    a kernel that has started.

    Dims are padded to the tile of the matrix unit, rows not: they are many. A tile of the result
    costs as much again as `fill` steps of its sum, to load the first operands and to store.
    """
    k, n = padded(fan_in, rates.tile), padded(fan_out, rates.tile)
    compute = 2 * rows * (k + rates.fill) * n / rates.flops
    return roofline(compute, num_bytes / rates.memory)


def flash_attention(rates: Rates, flops: float, head_dim: float, *, backward: bool) -> float:
    """Returns seconds of fused attention over needed pairs.

    Forward are two matmuls of the needed FLOPs; backward are five (Dao 2023, "FlashAttention-2",
    section 2.3.2), the scores being computed again, at about 0.8 of the rate (same paper, figures
    5 and 6). A matrix unit of 128 lanes pads heads to it.

    Args:
        rates: Of the device.
        flops: Forward FLOPs of the pairs that the mask leaves.
        head_dim: Size of a head.
        backward: Whether the backward pass is meant, or the forward.
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
    """Returns seconds of attention that writes the scores of all pairs to memory.

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
