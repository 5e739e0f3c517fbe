"""Stand-ins for attention kernels in programs that a cost model reads.

JAX looks for cuDNN while it traces, and a cost model cannot read a kernel. Under `pricing`
attention is therefore written out. The name of its scope says that it is one kernel for each pass,
which share of all pairs the kernel computes, and how large the heads are.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.nn.attention.blockwise import Segments
from shardlib.nn.attention.mask import Mask, Places, places
from shardlib.nn.attention.plain import plain
from shardlib.nn.attention.splash import block_size
from shardlib.nn.remat import ATTENDED, tag

_SCOPE = "shardlib.attention="
_KERNEL = re.compile(rf"{re.escape(_SCOPE)}([\d.]+)x(\d+)")
_CUDNN_BLOCK = 128
"""Queries and keys of a block on GPUs, as the cost model assumes for known transformers."""


class Kernel(NamedTuple):
    """An attention kernel."""

    share: float
    """Share of all pairs that it computes."""
    head_dim: int


def stand_in(
    backend: str,
    mask: Mask,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
) -> jax.Array:
    """Returns attention as by the kernel `backend`, written out and marked. As with the kernels,
    the operands alone are kept for the backward pass, and the result if a remat policy says so. The
    mask that packed documents need on GPUs is not counted."""
    kernel = kernel_for(backend, mask, query, key)
    with jax.named_scope(_name(kernel)):
        return tag(_marked(mask, kernel, query, key, value, segments), ATTENDED)


def kernel_for(backend: str, mask: Mask, query: jax.Array, key: jax.Array) -> Kernel:
    """Returns the kernel by which `backend` computes attention."""
    block = block_size(query.shape[1]) if backend == "splash" else _CUDNN_BLOCK
    return Kernel(_share(mask, query.shape[1], key.shape[1], block), query.shape[-1])


def kernel_of(stack: str) -> Kernel | None:
    """Returns the kernel of which an operation with a name stack stands for a part, if any."""
    found = _KERNEL.search(stack)
    return Kernel(float(found[1]), int(found[2])) if found else None


def is_repeated(stack: str) -> bool:
    """Returns whether an operation of a kernel repeats a part of the forward pass in the backward
    pass."""
    within = stack[stack.rfind(_SCOPE) :]
    return "jvp(" in within and "transpose(" not in within


def _name(kernel: Kernel) -> str:
    return f"{_SCOPE}{kernel.share:.4f}x{kernel.head_dim}"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _marked(mask: Mask, kernel: Kernel, *arrays: Any) -> jax.Array:
    return _written_out(mask, *arrays)


def _forward(mask: Mask, kernel: Kernel, *arrays: Any) -> Any:
    return _written_out(mask, *arrays), arrays


def _backward(mask: Mask, kernel: Kernel, arrays: Any, grad: jax.Array) -> Any:
    *operands, segments = arrays
    with jax.named_scope(_name(kernel)):
        _, pull = jax.vjp(lambda q, k, v: _written_out(mask, q, k, v, segments), *operands)
        return *pull(grad), None


_marked.defvjp(_forward, _backward)


def _written_out(
    mask: Mask, query: jax.Array, key: jax.Array, value: jax.Array, segments: Segments
) -> jax.Array:
    # Each device computes its query heads, also where it shares key-value heads with others.
    if (group := query.shape[2] // key.shape[2]) > 1:
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    at, kv_at = (_places(x, ids) for x, ids in zip((query, key), segments, strict=True))
    return plain(query, key, value, mask.pairs(at, kv_at), mask)


def _places(x: jax.Array, segments: jax.Array | None) -> Places:
    # Computed by the program: as a constant, the mask of all pairs would take host memory.
    return places(x.shape[1], jnp.arange(x.shape[1], dtype=jnp.int32)[None], segments)


def _share(mask: Mask, length: int, kv_length: int, block: int) -> float:
    """Returns the share of blocks with a visible pair, which are computed whole."""
    if not mask.causal:
        return 1.0
    first = np.arange(0, length, block)
    last = np.minimum(first + block, kv_length) - 1
    nearest = first - (kv_length if mask.window is None else mask.window) + 1
    computed = last // block - np.maximum(nearest, 0) // block + 1
    return float(computed.sum()) / (len(first) * -(-kv_length // block))
