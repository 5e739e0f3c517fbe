"""Attention traced as one operation, for programs that are priced and never run.

Kernels compute attention in tiles and keep no scores, and devices along `context` share rows by
methods of their own. The operations of the plain formula show neither.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from shardlib.nn.attention.backends import Backend, resolve_backend
from shardlib.nn.attention.blockwise import Segments
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.plan import WHOLE_ROWS, ContextMethod
from shardlib.nn.attention.stand_in import Kernel, kernel_for
from shardlib.nn.remat import ATTENDED, tag
from shardlib.sharding.shared_rows import opaque

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RowAttention:
    """Attention of the positions of a row to each other, on any number of devices.

    As an operation it has the operands of `attend` without those that are None: query, key, value,
    segment ids of queries and keys, sinks; and its gradient has also that of the result.
    """

    mask: Mask
    method: ContextMethod
    """The method by which devices along `context` share a row; never `auto`."""
    length: int
    """Positions of a whole row."""
    kernel: Kernel
    """The kernel of a device."""


@dataclasses.dataclass(frozen=True)
class _Wanted:
    platform: str
    every: bool
    met: list[bool] = dataclasses.field(default_factory=list)
    """For each attention that was traced, whether it is one operation."""


_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("as_one", default=None)


@contextlib.contextmanager
def attention_as_one(platform: str, *, every: bool) -> Iterator[None]:
    """Traces attention of rows to themselves as one operation, which cannot run: that for which a
    platform has a kernel, or all of it for a mesh with devices along `context`."""
    token = _wanted.set(_Wanted(platform, every))
    try:
        # JAX keeps functions that it has traced apart by this metadata: none of them may run.
        with set_xla_metadata(shardlib_attention="as one"):
            yield
    finally:
        _wanted.reset(token)


def traced_alike(fn: Callable[..., T]) -> Callable[..., T]:
    """Returns a function that traces, and that traces attention later as it would here."""
    wanted = _wanted.get()
    if wanted is None:
        return fn

    @functools.wraps(fn)
    def traced(*arguments: Any) -> T:
        with attention_as_one(wanted.platform, every=wanted.every):
            return fn(*arguments)

    return traced


def attention_is_met() -> bool:
    """Returns whether any attention was traced by `attend` so far within `attention_as_one`."""
    wanted = _wanted.get()
    return wanted is not None and bool(wanted.met)


def as_one(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
    sinks: jax.Array | None,
    *,
    mask: Mask,
    backend: Backend,
    context: ContextMethod,
) -> jax.Array | None:
    """Returns what stands for the result of `attend`; None if its operations are to be traced."""
    wanted = _wanted.get()
    if wanted is None:
        return None
    resolved = resolve_backend(
        backend,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        softcap=mask.softcap,
        sinks=sinks is not None,
        masked=segments[0] is not None,
        lengths=(query.shape[1], key.shape[1]),
        platform=wanted.platform,
    )
    is_one = query.shape[1] == key.shape[1] and (resolved.backend != "xla" or wanted.every)
    wanted.met.append(is_one)
    if not is_one:
        return None
    method = context
    if method == "auto":
        method = "ulysses" if backend in WHOLE_ROWS else "ring"
    result = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), value.dtype)
    kernel = kernel_for(resolved.backend, mask, query, key)
    what = RowAttention(mask, method, query.shape[1], kernel)
    return tag(opaque(what, (query, key, value, *segments, sinks), result), ATTENDED)
