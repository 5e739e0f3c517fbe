"""Attention for training and decoding: grouped heads, packed documents, windows."""

import functools

import jax
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float, Int

from shardlib.errors import ModelError
from shardlib.nn.attention.as_one import as_one, note_unshared
from shardlib.nn.attention.backends import BY_HAND, Backend, resolve_backend
from shardlib.nn.attention.blockwise import Segments, blockwise
from shardlib.nn.attention.gather import gathered_attention
from shardlib.nn.attention.mask import Mask, places
from shardlib.nn.attention.order import AXIS, Order
from shardlib.nn.attention.plain import plain
from shardlib.nn.attention.plan import ContextMethod, ContextPlan, plan_context
from shardlib.nn.attention.region import in_region
from shardlib.nn.attention.ring import ring_attention
from shardlib.nn.attention.splash import splash
from shardlib.nn.attention.ulysses import ulysses_attention
from shardlib.sharding.constrain import active, is_plain
from shardlib.sharding.manual import axis_size
from shardlib.sharding.shared_rows import opaque, row_parts


def attend(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    *,
    segment_ids: Int[Array, "batch length"] | None = None,
    kv_segment_ids: Int[Array, "batch kv_length"] | None = None,
    positions: Int[Array, "#batch length"] | None = None,
    kv_positions: Int[Array, "#batch kv_length"] | None = None,
    bias: Float[Array, "heads length kv_length"] | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
    context: ContextMethod = "auto",
    order: Order = "contiguous",
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch length heads value_dim"]:
    """Returns softmax(scale * query key^T + bias) value, in the dtype of `value`.

    The softmax is in float32. A query sees a key if both have the same segment, the key does not
    come later (`causal`), and it is less than `window` positions away. Padding (segment 0) is a
    segment like any other: no other token sees it; the loss must ignore its finite outputs.

    Where the active rules split `length` over the mesh axis `context`, its devices share the row as
    `plan_context` says. With explicit positions, a bias, or a different number of keys, the
    compiler partitions attention instead, with positions or a bias by the backend `xla`.

    Args:
        query, key, value: Heads are a multiple of kv_heads, and each heads / kv_heads consecutive
            query heads share a key-value head. Values may have other dims than keys.
        segment_ids, kv_segment_ids: int32, the documents of queries and keys; None for the same.
        positions, kv_positions: int32, the positions of queries and keys; None for 0, 1, 2, ...
        bias: Added to the scores of each pair of positions, after scale and softcap, in float32.
        causal: Whether keys at later positions are hidden.
        window: Number of positions a query sees, including its own; None for all. Causal only.
        scale: Factor of the scores; None for 1 / sqrt(head_dim).
        softcap: Bound c of the scores, as c * tanh(scores / c); None for none.
        backend, context: See `resolve_backend` and `plan_context`.
        order: Order of the row over `context`: `zigzag` if all inputs went through `zigzag(x)`.
        sinks: Scores of one more key for each query head, whose value is 0; None for none. Source:
            OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", sec. 2.

    Raises:
        ModelError: If shapes do not fit, segment ids are missing, or an option cannot work.
    """
    mask = Mask(causal, window, scale, softcap)
    names = {"explicit positions": (positions, kv_positions), "a bias": (bias,)}
    explicit = [name for name, given in names.items() if any(x is not None for x in given)]
    _check_inputs(query, key, value, segment_ids, kv_segment_ids)
    _check_scores(query, key, bias, sinks)
    _check_options(query, key, backend, context, order, explicit)
    segments = (segment_ids, segment_ids if kv_segment_ids is None else kv_segment_ids)
    plan = None if explicit else _planned(query, key, mask, backend, context, order)
    if plan is None or (is_plain() and plan.method == "none"):
        lengths = (query.shape[1], key.shape[1])
        at, kv_at = map(places, lengths, (positions, kv_positions), segments)
        return plain(query, key, value, mask.pairs(at, kv_at), mask, bias, sinks)
    return _by_plan(plan, backend, context, order, mask, query, key, value, segments, sinks)


def _planned(
    query: jax.Array,
    key: jax.Array,
    mask: Mask,
    backend: Backend,
    context: ContextMethod,
    order: Order,
) -> ContextPlan:
    if query.shape[1] != key.shape[1]:
        return ContextPlan("none", order, "keys of another length")
    sizes = query.shape[1], query.shape[2], key.shape[2]
    return plan_context(
        *sizes,
        causal=mask.causal,
        window=mask.window,
        backend=backend,
        context=context,
        order=order,
    )


def _check_dims(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise ModelError(
                f"{name} has shape {array.shape}, expected [batch, length, heads, head_dim].\n"
                f"  Reshape it; {name}[:, :, None] gives [batch, length, head_dim] one head."
            )


def _check_inputs(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    segment_ids: Int[Array, "batch length"] | None,
    kv_segment_ids: Int[Array, "batch kv_length"] | None,
) -> None:
    _check_dims(query, key, value)
    length, kv_length = query.shape[1], key.shape[1]
    heads, kv_heads = query.shape[2], key.shape[2]
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} key-value heads.\n"
            "  Make the number of query heads a multiple of the number of key-value heads."
        )
    if segment_ids is None and kv_segment_ids is not None:
        raise ModelError(
            "kv_segment_ids are set, but segment_ids are not.\n  Give segment_ids as well."
        )
    if segment_ids is not None and kv_segment_ids is None and length != kv_length:
        raise ModelError(
            f"{length} segment_ids of the queries do not fit {kv_length} keys.\n"
            "  Give kv_segment_ids as well."
        )


def _check_scores(
    query: jax.Array, key: jax.Array, bias: jax.Array | None, sinks: jax.Array | None
) -> None:
    if sinks is not None and sinks.shape != (query.shape[2],):
        raise ModelError(
            f"sinks have shape {sinks.shape}, expected ({query.shape[2]},): a score for each query "
            "head.\n  Give an array of that shape, or leave sinks out."
        )
    expected = query.shape[2], query.shape[1], key.shape[1]
    if bias is not None and bias.shape != expected:
        raise ModelError(
            f"bias has shape {bias.shape}, expected {expected}: [heads, length, kv_length].\n"
            "  Give one number for each query head and pair of positions."
        )


def _check_options(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    backend: Backend,
    context: ContextMethod,
    order: Order,
    explicit: list[str],
) -> None:
    """Rejects options that need self-attention without explicit positions or a bias, elsewhere."""
    if explicit and backend not in ("auto", "xla"):
        raise ModelError(
            f"attention by {backend} does not take {' or '.join(explicit)}.\n"
            "  Use backend 'auto' or 'xla'."
        )
    if not explicit and query.shape[1] == key.shape[1]:
        return
    is_shared = axis_size(AXIS) > 1
    if context != "auto" and not is_shared:
        note_unshared(_for_rows_alone(f"context={context!r}"))
    options = [f"context={context!r}"] if context != "auto" and is_shared else []
    options += [] if order == "contiguous" else [f"order={order!r}"]
    if options:
        named = " and ".join(options)
        raise ModelError(f"{_for_rows_alone(named)}.\n  Leave out {named}.")


def _for_rows_alone(options: str) -> str:
    return f"attention with {options} is for self-attention without explicit positions or a bias"


def _by_plan(
    plan: ContextPlan,
    backend: Backend,
    context: ContextMethod,
    order: Order,
    mask: Mask,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
    sinks: jax.Array | None,
) -> jax.Array:
    arrays = (query, key, value, segments, sinks)
    if is_plain():
        return _in_proof(plan, mask, *arrays)
    one = as_one(*arrays, mask=mask, backend=backend, context=context, order=order)
    if one is not None:
        return one
    if plan.method in ("ring", "gather"):
        shared = ring_attention if plan.method == "ring" else gathered_attention
        share = functools.partial(shared, mask=mask, order=plan.order)
        return in_region(share, *arrays, over_context=True)
    resolved = resolve_backend(
        backend,
        dtype=query.dtype,
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        softcap=mask.softcap,
        sinks=sinks is not None,
        masked=segments[0] is not None,
        lengths=(query.shape[1] * row_parts(), key.shape[1] * row_parts()),
    )
    local = functools.partial(_on_device, resolved.backend, mask)
    kernel = resolved.backend in BY_HAND
    if plan.method == "ulysses":
        share = functools.partial(ulysses_attention, local, order=plan.order)
        return in_region(share, *arrays, over_context=True, whole_mesh=kernel)
    if kernel or resolved.backend == "blockwise":
        return in_region(local, *arrays, over_context=False, whole_mesh=kernel)
    return local(*arrays)


def _in_proof(
    plan: ContextPlan,
    mask: Mask,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
    sinks: jax.Array | None,
) -> jax.Array:
    """Returns what stands for attention that devices share."""
    result = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), value.dtype)
    return opaque(("attend", plan, mask), (query, key, value, *segments, sinks), result)


def _on_device(
    backend: str,
    mask: Mask,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: Segments,
    sinks: jax.Array | None,
) -> jax.Array:
    """Returns attention computed by one backend."""
    if backend == "blockwise":
        return blockwise(query, key, value, segments, sinks, mask=mask)
    assert sinks is None or backend == "xla", "other backends are not chosen for sinks"
    if backend == "splash":
        return splash(query, key, value, segments, mask=mask)
    at, kv_at = (
        places(x.shape[1], None, ids) for x, ids in zip((query, key), segments, strict=True)
    )
    scope = active()
    # JAX looks for cuDNN while it traces. A mesh without devices is used for shapes alone.
    if backend == "xla" or (scope and isinstance(scope.mesh, AbstractMesh)):
        return plain(query, key, value, mask.pairs(at, kv_at), mask, None, sinks)
    # Passed as arguments rather than in the mask, so that hidden pairs are not computed at all.
    visible = Mask(causal=False).pairs(at, kv_at)
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=None if visible is None else visible[:, None],
            scale=mask.scale,
            is_causal=mask.causal,
            local_window_size=None if mask.window is None else (mask.window - 1, 0),
            implementation="cudnn",
        )
