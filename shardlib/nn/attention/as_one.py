"""Attention traced as one operation, for programs that are priced and never run.

Kernels compute attention in tiles and keep no scores, and devices along `context` share rows by
methods of their own. The operations of the plain formula show neither.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from shardlib.nn.attention.backends import BY_HAND, Backend, resolve_backend
from shardlib.nn.attention.blockwise import Segments
from shardlib.nn.attention.kernel import Kernel, kernel_for
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.order import Order
from shardlib.nn.attention.plan import WHOLE_ROWS, ContextMethod, sharing_faults
from shardlib.nn.attention.ulysses import kv_heads_of
from shardlib.nn.remat import ATTENDED
from shardlib.sharding.shared_rows import opaque

T = TypeVar("T")
AsOne = Literal["kernels", "regions", "rows"]


@dataclasses.dataclass(frozen=True)
class RowAttention:
    """Attention of the positions of a row to each other, or to a row of another length, on any
    number of devices.

    As an operation it has the operands of `attend` without those that are None: query, key, value,
    segment ids of queries and keys, sinks; and its gradient has also the result and its gradient.
    """

    mask: Mask
    method: Literal["none", "ring", "gather", "ulysses"]
    """The method by which devices along `context` share a row; `none` for keys of another length:
    every device has whole rows."""
    backend: Backend
    """The backend that the model asks for."""
    order: Order
    """The order of the row without devices along `context`: `plan_context` gives a model that asks
    for none zig-zag order only where that fits."""
    length: int
    """Keys of a whole row."""
    heads: int
    kv_heads: int
    kernel: Kernel
    """The kernel of a device."""
    by_hand: bool
    """Whether whole rows are computed in a region that is manual over the whole mesh."""

    @property
    def shares_rows(self) -> bool:
        """Whether devices along `context` share rows."""
        return self.method != "none"

    def faults(self, shards: int, parts: int = 1) -> list[str]:
        """Returns why `shards` devices along `context` cannot share rows, if heads are in
        `parts`."""
        if not self.shares_rows:
            return []
        return sharing_faults(
            self.method,
            backend=self.backend,
            order=self.order,
            length=self.length,
            shards=shards,
            heads=self.heads,
            parts=parts,
        )

    def key_copies(self, shards: int, parts: int = 1) -> float:
        """Returns the key-value heads that a device sends to `shards` devices for each of its own,
        if heads are in `parts`: more than one by `ulysses` where devices share a head."""
        heads, kv_heads = self.heads // parts, self.kv_heads_of_device(parts)
        if self.method != "ulysses" or heads % shards:
            return 1.0
        return kv_heads_of(heads, kv_heads, shards).size / kv_heads

    def kv_heads_of_device(self, parts: int) -> int:
        """Returns the key-value heads of a device, if query heads are in `parts`. Devices may share
        a head."""
        return kv_heads_of(self.heads, self.kv_heads, parts).shape[1]


@dataclasses.dataclass(frozen=True)
class _Wanted:
    platform: str | None
    which: AsOne
    number: int
    met: list[bool] = dataclasses.field(default_factory=list)
    """For each attention that was traced, whether it is one operation."""
    unshared: dict[str, None] = dataclasses.field(default_factory=dict)
    """Why `attend` would refuse a mesh with devices along `context`."""


_numbers = itertools.count()
_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("as_one", default=None)


@contextlib.contextmanager
def attention_as_one(platform: str | None, which: AsOne = "kernels") -> Iterator[None]:
    """Traces attention as one operation, which cannot run. Within another such context it changes
    nothing.

    Args:
        platform: `cpu`, `gpu` or `tpu`; None for that of the active mesh or of this machine.
        which: Attention that is one operation: by the kernels of the platform; or in `regions`, all
            by a kernel or blockwise; or also that of `rows` to themselves, which devices along
            `context` may share.
    """
    if _wanted.get() is not None:
        yield
        return
    wanted = _Wanted(platform, which, next(_numbers))
    token = _wanted.set(wanted)
    try:
        # JAX keeps functions that it has traced apart by this metadata: none of them may run, and
        # each context meets the attention of all functions.
        with set_xla_metadata(shardlib_attention=f"as one {wanted.number}"):
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
        with attention_as_one(wanted.platform, wanted.which):
            return fn(*arguments)

    return traced


def attention_is_met() -> bool:
    """Returns whether any attention was traced by `attend` so far within `attention_as_one`."""
    wanted = _wanted.get()
    return wanted is not None and bool(wanted.met)


def note_unshared(fault: str) -> None:
    """Notes within `attention_as_one` why `attend` would refuse devices along `context`."""
    wanted = _wanted.get()
    if wanted is not None:
        wanted.unshared[fault] = None


def unshared_attention() -> tuple[str, ...]:
    """Returns why `attend` would refuse devices along `context`, by the attention that was traced
    so far within `attention_as_one`."""
    wanted = _wanted.get()
    return () if wanted is None else tuple(wanted.unshared)


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
    order: Order,
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
    is_row = query.shape[1] == key.shape[1]
    by_hand = resolved.backend in BY_HAND
    in_region = wanted.which != "kernels" and resolved.backend != "xla"
    is_one = by_hand or in_region or (is_row and wanted.which == "rows")
    wanted.met.append(is_one)
    if not is_one:
        return None
    usual = "ulysses" if backend in WHOLE_ROWS else "ring"
    method = "none" if not is_row else usual if context == "auto" else context
    result = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), value.dtype)
    kernel = kernel_for(resolved.backend, mask, query, key)
    lengths = key.shape[1], query.shape[2], key.shape[2]
    what = RowAttention(mask, method, backend, order, *lengths, kernel, by_hand)
    # The gradient of a kernel takes its result: without it the kernel runs again.
    return opaque(what, (query, key, value, *segments, sinks), result, tag=ATTENDED)
