"""Splash attention: the JAX flash kernel for TPUs, which skips the hidden blocks of a mask.

Source: `jax.experimental.pallas.ops.tpu.splash_attention`.
"""

from typing import Any

import jax
from jaxtyping import Array, Float

from shardlib.nn.attention.blockwise import Segments
from shardlib.nn.attention.mask import Mask
from shardlib.nn.remat import ATTENDED

_MAX_BLOCK = 512


def block_size(length: int) -> int:
    """Returns the queries and keys of a block of a row, whose length is a multiple of 128."""
    return next(size for size in (_MAX_BLOCK, 256, 128) if length % size == 0)


def splash(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    segments: Segments = (None, None),
    *,
    mask: Mask,
    interpret: bool = False,
) -> Float[Array, "batch length heads value_dim"]:
    """Returns attention of arrays that are whole on this device, as `attend` does. The length of
    queries is a multiple of 128; segments are [batch, length] int32 of queries and of keys, or
    None. `interpret` runs the kernel without a TPU, slowly.

    The compiler cannot partition the kernel: with several devices, call it in a region that is
    manual over the whole mesh.
    """
    # A slow import, needed on TPUs only.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = query.shape[1], query.shape[2]
    shape = (length, key.shape[1])
    if not mask.causal:
        head_mask = masks.FullMask(shape)
    elif mask.window is None:
        head_mask = masks.CausalMask(shape)
    else:
        head_mask = masks.LocalMask(shape, (mask.window - 1, 0), 0)
    block = block_size(length)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = kernels.make_splash_mha(
        mask=masks.MultiHeadMask([head_mask] * heads),
        block_sizes=kernels.BlockSizes(**{f"block_{name}": block for name in names}),  # type: ignore
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=mask.softcap,
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
    q_ids, kv_ids = segments
    ids = None if q_ids is None or kv_ids is None else kernels.SegmentIds(q_ids, kv_ids)
    query = mask.scaled(query, query.shape[-1])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        y: Any = jax.vmap(kernel)(*(x.swapaxes(1, 2) for x in (query, key, value)), ids)
    return y.swapaxes(1, 2).astype(value.dtype)
