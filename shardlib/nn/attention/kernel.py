"""Attention kernels, as a cost model knows them."""

from typing import NamedTuple

import jax
import numpy as np

from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.splash import block_size

_CUDNN_BLOCK = 128
"""Queries and keys of a block on GPUs, as the cost model assumes for known transformers."""


class Kernel(NamedTuple):
    """An attention kernel, without the mask that packed documents need on GPUs."""

    share: float
    """Share of all pairs that it computes."""
    head_dim: int


def kernel_for(backend: str, mask: Mask, query: jax.Array, key: jax.Array) -> Kernel:
    """Returns the kernel by which `backend` computes attention."""
    block = block_size(query.shape[1]) if backend == "splash" else _CUDNN_BLOCK
    return Kernel(_share(mask, query.shape[1], key.shape[1], block), query.shape[-1])


def _share(mask: Mask, length: int, kv_length: int, block: int) -> float:
    """Returns the share of blocks with a visible pair, which are computed whole."""
    if not mask.causal:
        return 1.0
    first = np.arange(0, length, block)
    last = np.minimum(first + block, kv_length) - 1
    nearest = first - (kv_length if mask.window is None else mask.window) + 1
    computed = last // block - np.maximum(nearest, 0) // block + 1
    return float(computed.sum()) / (len(first) * -(-kv_length // block))
