"""The choice of how to split attention over the `context` axis of the mesh.

| method    | sent in the forward pass       | memory           | heads                           |
|-----------|--------------------------------|------------------|---------------------------------|
| `ring`    | keys and values, by hops       | one shard's      | any                             |
| `gather`  | keys and values, all at once   | the whole row's  | any                             |
| `ulysses` | query, key, value and output   | one shard's      | the axis divides a device's own |
"""

import dataclasses
from typing import Literal, get_args

from shardlib.errors import ModelError, did_you_mean
from shardlib.mesh import entry_axes, mesh_sizes
from shardlib.nn.attention.backends import Backend
from shardlib.nn.attention.order import AXIS, Order, ring_tile
from shardlib.nn.attention.tiles import MAX_TILE
from shardlib.sharding.constrain import Scope, active
from shardlib.sharding.shared_rows import proof_scope, row_parts

ContextMethod = Literal["auto", "ring", "gather", "ulysses"]

WHOLE_ROWS = ("xla", "cudnn", "splash")
"""Backends that compute whole rows."""


@dataclasses.dataclass(frozen=True)
class ContextPlan:
    """The method by which the devices along `context` share a row."""

    method: Literal["none", "ring", "gather", "ulysses"]
    order: Order
    """The order of the row over the axis; if `zigzag`, reorder the inputs with `zigzag`."""
    reason: str


def plan_context(
    length: int,
    heads: int,
    kv_heads: int,
    *,
    causal: bool = True,
    window: int | None = None,
    dropout: float = 0.0,
    context: ContextMethod = "auto",
    backend: Backend = "auto",
    order: Order | None = None,
) -> ContextPlan:
    """Chooses how attention is split over the `context` axis of the active mesh.

    Args:
        length: Positions of the row that the code sees, which is a part where `row_parts` says so.
        heads: Query heads of the model.
        kv_heads: Key-value heads of the model.
        causal: As in `attend`.
        window: As in `attend`.
        dropout: Dropout rate of the model. Its masks are drawn by index, so a reordered row would
            get different masks.
        context: The requested method; `auto` takes `ring`, or `gather` in a mesh with pipeline
            stages, or `ulysses` for a backend that needs whole rows.
        backend: As in `attend`.
        order: The order of the row; None to choose.

    Raises:
        ModelError: If the method or the order is unknown, or the requested method cannot work; the
            message lists all reasons. Also if the row is in zig-zag order and the mesh has a
            `context` axis, but the rules or an enclosing manual region keep it from splitting the
            row.
        RuleError: If the mesh does not divide the length or the heads.
    """
    _check_names(context, order)
    scope = proof_scope() or active()
    if scope is None or mesh_sizes(scope.mesh).get(AXIS, 1) == 1:
        return ContextPlan("none", "contiguous", f"no axis {AXIS} of the mesh splits the row")
    shards, length = _shards(scope), length * row_parts()
    if shards == 1:
        return _whole(scope, order, f"{AXIS} is manual in an enclosing region")
    over = row_axes(scope, length)
    if not over:
        return _whole(scope, order, "the rules leave 'length' whole")
    if over != (AXIS,):
        raise ModelError(
            f"the rules split 'length' over {'+'.join(over)}, but attention shares a row over "
            f"{AXIS} alone.\n  Set the activation rule of 'length' to {AXIS!r}."
        )
    method, why = _method(scope, context, backend)
    best, why_order = _order(method, length // shards, shards, causal, window, dropout)
    order = order or best
    faults = _faults(scope, method, backend, order, length, heads, dropout)
    if faults:
        raise ModelError(
            f"attention by {method} over {AXIS}={shards} cannot work: {'; '.join(faults)}.\n"
            f"  {_remedy(scope, method)}"
        )
    why_order = why_order if order == best else "given"
    return ContextPlan(method, order, f"{method}: {why}; {order} order: {why_order}")


def row_axes(scope: Scope, length: int) -> tuple[str, ...]:
    """Returns the mesh axes over which rows of `length` positions are cut."""
    if row_parts() > 1:
        return (AXIS,)
    return entry_axes(scope.sharding(("length",), (length,), "activations").spec[0])


def _shards(scope: Scope) -> int:
    """Returns the number of devices that share a row."""
    sizes = mesh_sizes(scope.mesh) if row_parts() > 1 else scope.sizes
    return sizes[AXIS]


def _check_names(context: ContextMethod, order: Order | None) -> None:
    methods, orders = get_args(ContextMethod), get_args(Order)
    for name, value, known in (("context", context, methods), ("order", order, (None, *orders))):
        if value not in known:
            choices = [choice for choice in known if choice is not None]
            hint = did_you_mean(str(value), choices)
            raise ModelError(
                f"{name}={value!r} is not known to attention.{hint}\n"
                f"  Choose one of: {', '.join(choices)}."
            )


def _whole(scope: Scope, order: Order | None, reason: str) -> ContextPlan:
    """Returns the plan of a row that is not split, though the mesh has devices along `context`."""
    if order == "zigzag":
        raise ModelError(
            f"a row in zig-zag order is split over {AXIS}={mesh_sizes(scope.mesh)[AXIS]}, but "
            f"{reason}: attention would read its tokens in contiguous order.\n"
            "  Leave out both `zigzag` and order='zigzag'."
        )
    return ContextPlan("none", "contiguous", reason)


def _method(
    scope: Scope, context: ContextMethod, backend: Backend
) -> tuple[Literal["ring", "gather", "ulysses"], str]:
    if context != "auto":
        return context, "asked for"
    if backend in WHOLE_ROWS:
        return "ulysses", f"the backend {backend} needs whole rows"
    if _stages(scope) > 1:
        return "gather", "the hops of a ring would make idle pipeline stages take part"
    return "ring", "memory of one shard, for any number of heads"


def _order(
    method: str, here: int, shards: int, causal: bool, window: int | None, dropout: float
) -> tuple[Order, str]:
    if method == "ulysses":
        return "contiguous", "each device computes whole rows"
    if not causal:
        return "contiguous", "without a causal mask all chunks have equal work"
    if window is not None:
        return "contiguous", "with a window all chunks have equal work"
    if dropout > 0:
        return "contiguous", f"the masks of dropout={dropout} depend on the order"
    if ring_tile("zigzag", here) is None:
        chunks = f"{2 * shards} chunks of whole tiles"
        return "contiguous", f"{here * shards} positions cannot be cut into {chunks}"
    return "zigzag", "an early and a late chunk on each device balance causal work"


def _faults(
    scope: Scope,
    method: str,
    backend: Backend,
    order: Order,
    length: int,
    heads: int,
    dropout: float,
) -> list[str]:
    return sharing_faults(
        method,
        backend=backend,
        order=order,
        length=length,
        shards=_shards(scope),
        heads=heads,
        parts=scope.parts("heads", heads) if method == "ulysses" else 1,
        dropout=dropout,
        stages=_stages(scope),
    )


def sharing_faults(
    method: str,
    *,
    backend: Backend,
    order: Order,
    length: int,
    shards: int,
    heads: int,
    parts: int = 1,
    dropout: float = 0.0,
    stages: int = 1,
) -> list[str]:
    """Returns why `shards` devices cannot share rows of `length` positions by a method.

    Args:
        method: `ring`, `gather` or `ulysses`.
        backend: As in `attend`.
        order: The order of the row.
        length: Positions of a whole row.
        shards: Devices along `context`.
        heads: Query heads of the model.
        parts: Parts into which the rules cut the heads.
        dropout: As in `plan_context`.
        stages: Pipeline stages of the mesh.
    """
    here, left = divmod(length, shards)
    if left:
        return [f"{shards} devices do not divide rows of {length} positions"]
    faults = []
    if order == "zigzag" and dropout > 0:
        faults.append(f"zig-zag order would change the masks of dropout={dropout}")
    if method == "ring" and stages > 1:
        faults.append(
            "its hops are collective-permutes, in which idle pipeline stages would have to take "
            f"part, and the mesh has stage={stages}"
        )
    if method == "ulysses":
        over = heads // parts
        if over % shards:
            split = "" if over == heads else f" (of {heads}, after the split by the rules)"
            faults.append(f"{over} heads{split} cannot be divided over {shards} devices")
        if order == "zigzag" and here % 2:
            faults.append(f"a shard of {here} positions cannot be halved for zig-zag order")
        return faults
    if backend in WHOLE_ROWS:
        faults.append(f"{method} computes in tiles, but the backend {backend} needs whole rows")
    if ring_tile(order, here) is None:
        half = "" if order == "contiguous" else "half of "
        faults.append(
            f"{half}a shard of {here} positions cannot be cut into tiles of 64 to {MAX_TILE}"
        )
    return faults


def _stages(scope: Scope) -> int:
    return mesh_sizes(scope.mesh).get("stage", 1)


def _remedy(scope: Scope, method: str) -> str:
    if method == "ulysses":
        return "Use context 'ring' or 'gather', or a smaller context axis."
    if method == "ring" and _stages(scope) > 1:
        return "Use context 'auto' or 'gather'."
    return "Use backend 'auto', and a length that is a power of two."
