"""The choice of the attention implementation.

| backend     | runs on          | memory              | hidden pairs                     |
|-------------|------------------|---------------------|----------------------------------|
| `xla`       | everything       | length squared      | computed                         |
| `blockwise` | everything       | length              | skipped by tiles, documents too  |
| `cudnn`     | GPU, 16 bits     | length, if unmasked | skipped                          |
| `splash`    | TPU              | length              | skipped by tiles                 |
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError, did_you_mean
from shardlib.nn.attention.tiles import MAX_TILE, tile_size
from shardlib.sharding.constrain import platform as active_platform

Backend = Literal["auto", "xla", "blockwise", "cudnn", "splash"]

# The limits of cuDNN's flash attention for 16-bit floats on every generation since Ampere.
# Source: NVIDIA cuDNN developer guide, "Scaled dot product attention".
_CUDNN_MAX_HEAD_DIM = 128
_CUDNN_HEAD_DIM_MULTIPLE = 8

# Lanes of a TPU's vector registers, which the blocks of the kernel fill.
# Source: the JAX documentation, "Writing TPU kernels with Pallas".
_SPLASH_MULTIPLE = 128

LONG_PAIRS = 4096 * 4096
"""Number of (query, key) pairs from which `auto` takes `blockwise` rather than `xla`: the scores of
one head then take 64 MiB in the forward pass, and again in the backward pass."""

BY_HAND = ("cudnn", "splash")
"""Kernels that run in a region manual over the whole mesh: the compiler cannot partition splash,
nor cuDNN within a region that is already manual over an axis."""
_KERNELS = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The chosen attention implementation and the reason."""

    backend: Literal["xla", "blockwise", "cudnn", "splash"]
    reason: str


def resolve_backend(
    backend: Backend,
    *,
    dtype: jax.typing.DTypeLike,
    head_dim: int,
    value_dim: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    masked: bool = False,
    lengths: tuple[int, ...] = (),
    platform: str | None = None,
) -> Resolved:
    """Returns the implementation that `attend` uses: the platform's own kernel where it can run,
    else `xla`, or `blockwise` where the scores of all pairs would take too much memory.

    Args:
        backend: The requested backend; `auto` chooses.
        dtype: Dtype of query, key and value.
        head_dim: Size of one head.
        value_dim: Size of one head of the values; None for the same.
        softcap: As in `attend`.
        sinks: Whether heads have sinks, as in `attend`.
        masked: Whether there is a mask in addition to the causal one and the window: packed
            documents or explicit positions. cuDNN gets it as an array [batch, 1, length, length].
        lengths: Number of queries and of keys; empty if unknown.
        platform: `cpu`, `gpu` or `tpu`; None for the platform of the active mesh, or of this
            process without one.

    Raises:
        ModelError: If the requested backend is unknown or cannot run.
    """
    _check_name(backend)
    platform = platform or active_platform()
    kernel = _KERNELS.get(platform)
    wanted = backend if backend != "auto" else kernel
    obstacles = ["heads have sinks"] if sinks and wanted in ("cudnn", "splash") else []
    if wanted == "cudnn":
        head = head_dim, head_dim if value_dim is None else value_dim
        obstacles += cudnn_obstacles(platform, dtype, head, softcap, masked, lengths)
    elif wanted == "splash":
        obstacles += _splash(platform, lengths)
    elif wanted == "blockwise":
        obstacles += _blockwise(lengths)
    if backend != "auto":
        if obstacles:
            raise ModelError(
                f"attention by {backend} cannot run here: {'; '.join(obstacles)}.\n"
                "  Use backend 'auto' or 'xla'."
            )
        return Resolved(backend, "asked for")
    if kernel == "cudnn" and not obstacles:
        return Resolved("cudnn", "an NVIDIA GPU in 16 bits")
    if kernel == "splash" and not obstacles:
        return Resolved("splash", "a TPU, and a length in whole blocks")
    reason = "; ".join(obstacles) or f"the platform is {platform}"
    if _is_long(lengths) and not _blockwise(lengths):
        scores = " x ".join(map(str, lengths))
        return Resolved("blockwise", f"{reason}; {scores} scores a head are too many to keep")
    return Resolved("xla", reason)


def _check_name(backend: str) -> None:
    known = get_args(Backend)
    if backend not in known:
        raise ModelError(
            f"no attention backend is called {backend!r}.{did_you_mean(str(backend), known)}\n"
            f"  Choose one of: {', '.join(known)}."
        )


def _is_long(lengths: tuple[int, ...]) -> bool:
    return len(lengths) == 2 and lengths[0] * lengths[1] >= LONG_PAIRS


def cudnn_obstacles(
    platform: str,
    dtype: jax.typing.DTypeLike,
    dims: tuple[int, int],
    softcap: float | None,
    masked: bool,
    lengths: tuple[int, ...],
) -> list[str]:
    """Returns why cuDNN cannot compute an attention whose heads of keys and of values have `dims`;
    see `resolve_backend`. A mask of odd lengths is refused for its gradient."""
    (head_dim, value_dim), obstacles = dims, list[str]()
    if _KERNELS.get(platform) != "cudnn":
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
    if softcap is not None:
        obstacles.append("the scores have a softcap")
    if value_dim != head_dim:
        obstacles.append(f"heads of keys have {head_dim} dims, and of values {value_dim}")
    return obstacles


def _splash(platform: str, lengths: tuple[int, ...]) -> list[str]:
    obstacles = []
    if _KERNELS.get(platform) != "splash":
        obstacles.append(f"the platform is {platform}")
    if any(length % _SPLASH_MULTIPLE for length in lengths):
        obstacles.append(f"a length of {lengths} is not a multiple of {_SPLASH_MULTIPLE}")
    if len(set(lengths)) > 1:
        obstacles.append(f"the lengths {lengths} differ")
    return obstacles


def _blockwise(lengths: tuple[int, ...]) -> list[str]:
    awkward = [str(length) for length in lengths if tile_size(length) is None]
    if not awkward:
        return []
    return [f"a length of {', '.join(awkward)} does not divide into tiles of 64 to {MAX_TILE}"]
