"""Stand-ins for attention kernels in programs that are traced for shapes and prices.

JAX looks for cuDNN while it traces, and a cost model cannot read a kernel. On a mesh without
devices attention is therefore plain. Its scope says that it is one kernel for each pass, and which
share of all pairs the kernel computes.
"""

import re
from collections.abc import Callable

import jax
import numpy as np

from shardlib.nn.attention.blockwise import Segments
from shardlib.nn.attention.mask import Mask
from shardlib.nn.remat import ATTENDED, tag

_SCOPE = "attention_kernel"
_SHARE = re.compile(rf"{_SCOPE}_([\d.]+)")
Attention = Callable[[jax.Array, jax.Array, jax.Array, Segments], jax.Array]


def stand_in(
    attention: Attention,
    mask: Mask,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
) -> jax.Array:
    """Returns `attention(query, key, value, segments)`, marked as a kernel that computes the pairs
    of a row that `mask` leaves. As with the kernels, the operands alone are kept for the backward
    pass, unless a remat policy keeps the result."""
    share = _visible_share(mask, query.shape[1], key.shape[1])
    with jax.named_scope(f"{_SCOPE}_{share:.4f}"):
        return tag(jax.checkpoint(attention)(query, key, value, segments), ATTENDED)


def kernel_share(stack: str) -> float | None:
    """Returns the share of all pairs that an attention kernel computes, for the name stack of an
    operation that stands for a part of it; None for other operations."""
    found = _SHARE.search(stack)
    return float(found[1]) if found else None


def is_repeated(stack: str) -> bool:
    """Returns whether an operation repeats, in the backward pass of a kernel, a part of its forward
    pass."""
    return "rematted_computation" in stack[stack.rfind(_SCOPE) :]


def _visible_share(mask: Mask, length: int, kv_length: int) -> float:
    if not mask.causal:
        return 1.0
    seen = np.minimum(np.arange(1, length + 1), kv_length if mask.window is None else mask.window)
    return float(seen.sum()) / (length * kv_length)
