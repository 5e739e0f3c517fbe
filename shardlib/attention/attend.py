"""One attention for training and decoding: grouped heads, packed documents, windows."""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError

Backend = Literal["auto", "xla", "cudnn"]

# The limits of cuDNN's flash attention for 16-bit floats on every generation since Ampere.
# Source: NVIDIA cuDNN developer guide, "Scaled dot product attention".
_CUDNN_MAX_HEAD_DIM = 128
_CUDNN_HEAD_DIM_MULTIPLE = 8

# Far below any score, and finite: a row in which all is hidden gives a mean, not NaN.
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The implementation that attention takes, and why."""

    backend: Literal["xla", "cudnn"]
    reason: str


def resolve_backend(
    backend: Backend,
    *,
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    masked: bool = False,
    lengths: tuple[int, ...] = (),
    platform: str | None = None,
) -> Resolved:
    """Says which implementation `attend` takes.

    `cudnn` is flash attention on NVIDIA GPUs: memory grows with the length, not its square. `xla`
    runs everywhere and keeps the scores of all pairs of positions.

    Args:
        backend: What was asked for; `auto` takes `cudnn` where it can.
        dtype: Dtype of query, key and value.
        head_dim: Size of one head.
        masked: Whether there is a mask besides the causal one and the window: packed documents, or
            explicit positions. It reaches cuDNN as an array of [batch, 1, length, length].
        lengths: Positions of query and of key; empty when not known.
        platform: `cpu`, `gpu` or `tpu`; None for the default backend of this process.

    Raises:
        ModelError: If `cudnn` is asked for where it cannot run.
    """
    platform = platform or jax.default_backend()
    obstacles = []
    if platform not in ("gpu", "cuda"):
        obstacles.append(f"the platform is {platform}")
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        obstacles.append(f"the dtype is {jnp.dtype(dtype).name}, not bfloat16 or float16")
    if head_dim > _CUDNN_MAX_HEAD_DIM or head_dim % _CUDNN_HEAD_DIM_MULTIPLE:
        obstacles.append(
            f"head_dim is {head_dim}, not a multiple of {_CUDNN_HEAD_DIM_MULTIPLE} "
            f"up to {_CUDNN_MAX_HEAD_DIM}"
        )
    if masked and any(length % 2 for length in lengths):
        obstacles.append(f"there is a mask, and a length of {lengths} is odd")
    if backend == "cudnn" and obstacles:
        raise ModelError(
            f"attention by cudnn cannot run here: {'; '.join(obstacles)}.\n"
            "  Use backend 'auto' or 'xla'."
        )
    if backend == "xla":
        return Resolved("xla", "asked for")
    if obstacles:
        return Resolved("xla", "; ".join(obstacles))
    return Resolved("cudnn", "asked for" if backend == "cudnn" else "an NVIDIA GPU in 16 bits")


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
    backend: Backend = "auto",
) -> jax.Array:
    """Returns softmax(query key^T / sqrt(head_dim)) value; the softmax is in float32.

    A query sees a key when they are of the same segment, the key does not come later (`causal`),
    and it is less than `window` positions away. Padding (segment 0) is a segment like any other:
    nothing else sees it, and its own outputs are finite and for the loss to leave out.

    Args:
        query: [batch, length, heads, head_dim].
        key: [batch, kv_length, kv_heads, head_dim]; heads are a multiple of kv_heads, and each
            heads / kv_heads neighbouring query heads share a key-value head.
        value: As `key`.
        segment_ids: [batch, length] int32, the document of each query.
        kv_segment_ids: [batch, kv_length] int32; None for `segment_ids`.
        positions: [batch, length] int32, where the queries stand; None for 0, 1, 2, ...
        kv_positions: [batch, kv_length] int32; None for 0, 1, 2, ...
        causal: Whether keys at later positions are hidden.
        window: How many positions a query sees, itself included; None for all. Causal only.
        backend: See `resolve_backend`.

    Returns:
        [batch, length, heads, head_dim], in the dtype of `value`.

    Raises:
        ModelError: If the heads do not divide, a window is not causal, or `backend` cannot run.
    """
    _check(query, key, causal, window)
    explicit = positions is not None or kv_positions is not None
    masked = segment_ids is not None or explicit
    resolved = resolve_backend(
        backend,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        masked=masked,
        lengths=(query.shape[1], key.shape[1]),
    )
    if resolved.backend == "xla" or explicit:
        mask = _mask(
            query, key, segment_ids, kv_segment_ids, positions, kv_positions, causal, window
        )
        return _xla(query, key, value, mask)
    # Said in words rather than by the mask, so that hidden pairs are not computed at all.
    mask = _mask(query, key, segment_ids, kv_segment_ids, causal=False)
    sees = None if window is None else (window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=causal,
            local_window_size=sees,
            implementation="cudnn",
        )


def _xla(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Attention by two matmuls. The scores are float32 from the start: operands of 16 bits are
    widened rather than the result, whose gradient would mix dtypes and fail strict promotion."""
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    query = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    # In this order the matmuls read and write the scores as they lie; any other transposes them.
    query = jnp.transpose(query, (0, 2, 3, 1, 4)).astype(jnp.float32) / math.sqrt(head_dim)
    scores = jnp.einsum("bkgtd,bskd->bkgts", query, key.astype(jnp.float32))
    if mask is not None:
        # Added rather than selected by: the backward pass then need not look at the mask.
        scores = scores + jnp.where(mask, 0.0, _HIDDEN)[:, :, None]
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    y = jnp.einsum("bkgts,bskd->bkgtd", weights, value)
    return jnp.transpose(y, (0, 3, 1, 2, 4)).reshape(batch, length, heads, head_dim)


def _check(query: jax.Array, key: jax.Array, causal: bool, window: int | None) -> None:
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} key-value heads.\n"
            "  Make the number of query heads a multiple of it."
        )
    if window is not None and (window < 1 or not causal):
        raise ModelError(
            f"an attention window of {window} positions needs causal=True and at least 1 position."
            "\n  Set window=None, or causal=True and window=1 or more."
        )


def _mask(
    query: jax.Array,
    key: jax.Array,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    causal: bool = True,
    window: int | None = None,
) -> jax.Array | None:
    """Which query sees which key: [batch or 1, 1, length, kv_length] bool; None when all do."""
    parts = []
    if segment_ids is not None:
        kv_ids = segment_ids if kv_segment_ids is None else kv_segment_ids
        parts.append(segment_ids[:, :, None] == kv_ids[:, None, :])
    if causal:
        rows = jnp.arange(query.shape[1])[None] if positions is None else positions
        columns = jnp.arange(key.shape[1])[None] if kv_positions is None else kv_positions
        distance = rows[:, :, None] - columns[:, None, :]
        parts.append(distance >= 0)
        if window is not None:
            parts.append(distance < window)
    if not parts:
        return None
    mask = parts[0]
    for part in parts[1:]:
        mask = mask & part
    return mask[:, None]
