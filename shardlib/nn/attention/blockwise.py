"""Attention tile by tile: memory grows linearly with the length.

The forward pass visits the tiles of (queries, keys) that have a visible pair and keeps a running
softmax. The backward pass visits them again and recomputes the weights from the logarithm of each
row's sum. Tiles hidden entirely by causality, window or document cost nothing.

The running softmax and the gradients can be carried from one set of keys to the next, as in a ring
over devices.

Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao 2023,
"FlashAttention-2", algorithms 1 and 2.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from shardlib.nn.attention.mask import Mask, Places, cut_places, places
from shardlib.nn.attention.tiles import AnyArray, needed_tile, tile_size
from shardlib.nn.remat import ATTENDED, tag

# Far below the initial peak, so that a hidden score weighs exactly 0 even in a row without a key
# so far.
_HIDDEN = -0.7 * float(jnp.finfo(jnp.float32).max)
_FIRST_PEAK = -1e30

Segments = tuple[jax.Array | None, jax.Array | None]
KeyGradients = tuple[jax.Array, jax.Array]
"""Gradients of keys and of values, in tiles and float32."""


class Queries(NamedTuple):
    """Queries in tiles."""

    query: jax.Array
    """[tiles, batch, kv_heads, group, tile, head_dim]; `group` query heads share a key head."""
    at: Places
    """[tiles, batch or 1, tile]."""


class Keys(NamedTuple):
    """Keys and values in tiles."""

    key: jax.Array
    """[tiles, batch, kv_heads, tile, head_dim]."""
    value: jax.Array
    at: Places


class Running(NamedTuple):
    """A float32 softmax over the keys seen so far."""

    total: jax.Array
    """Weighted sum of values, relative to the peak: [tiles, batch, kv_heads, group, tile, dim]."""
    mass: jax.Array
    """Sum of weights, relative to the peak: [tiles, batch, kv_heads, group, tile]."""
    peak: jax.Array
    """Largest score."""


class Cotangents(NamedTuple):
    """Inputs of the backward pass for each query, in tiles like the queries."""

    output: jax.Array
    """Cotangent of the output, in the dtype of the output."""
    delta: jax.Array
    """Product of the cotangent and the output, summed over value_dim: float32."""
    log_mass: jax.Array
    """Logarithm of the sum of exponentiated scores: float32."""


def cut_queries(x: jax.Array, kv_heads: int, tile: int) -> jax.Array:
    """Cuts [batch, length, heads, dim] to [tiles, batch, kv_heads, heads / kv_heads, tile, dim]."""
    batch, length, heads, dim = x.shape
    x = x.reshape(batch, length // tile, tile, kv_heads, heads // kv_heads, dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def join_queries(x: jax.Array) -> jax.Array:
    """Reverses `cut_queries`."""
    tiles, batch, kv_heads, group, tile, dim = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, tiles * tile, kv_heads * group, dim)


def cut_keys(x: jax.Array, tile: int) -> jax.Array:
    """Cuts [batch, length, kv_heads, dim] to [tiles, batch, kv_heads, tile, dim]."""
    batch, length, kv_heads, dim = x.shape
    return x.reshape(batch, length // tile, tile, kv_heads, dim).transpose(1, 0, 3, 2, 4)


def join_keys(x: jax.Array) -> jax.Array:
    """Reverses `cut_keys`."""
    tiles, batch, kv_heads, tile, dim = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, tiles * tile, kv_heads, dim)


def start(queries: Queries, value_dim: int, sinks: jax.Array | None) -> Running:
    """Returns the softmax over an empty set of keys, whose values have `value_dim` dims, or over a
    key for each head of score `sinks` [heads] and value 0."""
    rows = queries.query.shape[:-1]
    total = jnp.zeros((*rows, value_dim), jnp.float32)
    if sinks is None:
        peak = jnp.full(rows, _FIRST_PEAK, jnp.float32)
        return Running(total, jnp.zeros(rows, jnp.float32), peak)
    peak = jnp.broadcast_to(_by_head(sinks, rows), rows)
    return Running(total, jnp.ones(rows, jnp.float32), peak)


def _by_head(sinks: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """Returns the sinks [heads] in float32 as rows [tiles, batch, kv_heads, group, tile] of 1."""
    return sinks.astype(jnp.float32).reshape(1, 1, *rows[2:4], 1)


def fold(running: Running, queries: Queries, keys: Keys, mask: Mask) -> Running:
    """Returns the softmax with `keys` included."""
    rows, columns, count = _visits(mask.tiles(queries.at, keys.at))

    def visit(n: Any, running: Running) -> Running:
        row, column = rows[n], columns[n]
        scores, _, (_, _, value) = _scores(queries, keys, mask, row, column)
        total, mass, peak = _pick(running, row)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_peak[..., None])
        shrink = jnp.exp(peak - new_peak)
        seen = _einsum("bkgts,bksd->bkgtd", weights.astype(value.dtype), value)
        new = (
            total * shrink[..., None] + seen,
            mass * shrink + jnp.sum(weights, axis=-1),
            new_peak,
        )
        return Running(*_put(running, new, row))

    return jax.lax.fori_loop(0, count, visit, running)


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [tiles, batch, kv_heads, group, tile, dim] float32, and the logarithm of
    the sum of exponentiated scores. A query that sees nothing has an output of 0."""
    mass = jnp.maximum(running.mass, jnp.finfo(jnp.float32).tiny)
    return running.total / mass[..., None], running.peak + jnp.log(mass)


def pull_back(
    grad_query: jax.Array,
    queries: Queries,
    keys: Keys,
    cotangents: Cotangents,
    mask: Mask,
) -> tuple[jax.Array, KeyGradients]:
    """Returns `grad_query` plus the contribution of these keys, and the gradients of the keys and
    values from these queries; all in tiles and float32."""
    rows, columns, count = _visits(mask.tiles(queries.at, keys.at))
    scale = mask.factor(queries.query.shape[-1])

    def visit(n: Any, grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row, column = rows[n], columns[n]
        scores, slope, (query, key, value) = _scores(queries, keys, mask, row, column)
        output, delta, log_mass = _pick(cotangents, row)
        weights = jnp.exp(scores - log_mass[..., None])
        of_weights = _einsum("bkgtd,bksd->bkgts", output, value)
        of_scores = weights * (of_weights - delta[..., None]) * scale
        if slope is not None:
            of_scores = of_scores * slope
        of_scores = of_scores.astype(query.dtype)
        of_query, of_key, of_value = grads
        (old_query,) = _pick((of_query,), row)
        old_key, old_value = _pick((of_key, of_value), column)
        new_query = old_query + _einsum("bkgts,bksd->bkgtd", of_scores, key)
        new_key = old_key + _einsum("bkgts,bkgtd->bksd", of_scores, query)
        weights = weights.astype(output.dtype)
        new_value = old_value + _einsum("bkgts,bkgtd->bksd", weights, output)
        return (
            *_put((of_query,), (new_query,), row),
            *_put((of_key, of_value), (new_key, new_value), column),
        )

    zeros = (jnp.zeros(keys.key.shape, jnp.float32), jnp.zeros(keys.value.shape, jnp.float32))
    of_query, *of_keys = jax.lax.fori_loop(0, count, visit, (grad_query, *zeros))
    return of_query, tuple(of_keys)


def _visits(seen: AnyArray) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the rows, the columns and the number of the tiles to visit, row by row."""
    if isinstance(seen, np.ndarray):
        rows, columns = (jnp.asarray(x, jnp.int32) for x in np.nonzero(seen))
        return rows, columns, len(rows)
    rows, columns = jnp.nonzero(seen, size=seen.size, fill_value=0)
    return rows, columns, jnp.sum(seen, dtype=jnp.int32)


def _scores(
    queries: Queries, keys: Keys, mask: Mask, row: jax.Array, column: jax.Array
) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns the float32 scores of one tile, the derivative of their bound (None for 1), and its
    queries, keys and values."""
    query, at = jax.tree.map(lambda x: _take(x, row), queries)
    key, value, kv_at = jax.tree.map(lambda x: _take(x, column), keys)
    scores = mask.scaled(_einsum("bkgtd,bksd->bkgts", query, key), query.shape[-1])
    scores = mask.capped(scores)
    slope = mask.slope(scores)
    visible = mask.pairs(at, kv_at)
    if visible is not None:
        scores = jnp.where(visible[:, None, None], scores, _HIDDEN)
    return scores, slope, (query, key, value)


def _einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _take(x: AnyArray, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(jnp.asarray(x), index, 0, keepdims=False)


def _pick(arrays: tuple[jax.Array, ...], index: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_take(x, index) for x in arrays)


def _put(
    arrays: tuple[jax.Array, ...], new: tuple[jax.Array, ...], index: jax.Array
) -> tuple[jax.Array, ...]:
    update = jax.lax.dynamic_update_index_in_dim
    return tuple(update(x, y, index, 0) for x, y in zip(arrays, new, strict=True))


def cotangents(
    grad: jax.Array, output: jax.Array, log_mass: jax.Array, kv_heads: int, tile: int
) -> Cotangents:
    """Returns the residuals of the backward pass from the output and its cotangent, both
    [batch, length, heads, value_dim]; `log_mass` is as `finish` returned it."""
    grad, output = (cut_queries(x, kv_heads, tile) for x in (grad, output))
    delta = jnp.sum(grad.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    return Cotangents(grad, delta, log_mass)


def outputs(running: Running, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [batch, length, heads, value_dim] in `dtype`, and the logarithm of each
    row's sum. Both are tagged for `remat`."""
    output, log_mass = finish(running)
    return tag(join_queries(output).astype(dtype), ATTENDED), tag(log_mass, ATTENDED)


def of_sinks(cotangents: Cotangents, sinks: jax.Array | None) -> jax.Array | None:
    """Returns the gradient of the sinks from these queries.

    The softmax gives a sink the weight exp(sink - log_mass), and its value is 0.
    """
    if sinks is None:
        return None
    rows = cotangents.log_mass.shape
    weights = jnp.exp(_by_head(sinks, rows) - cotangents.log_mass)
    grads = -jnp.sum(weights * cotangents.delta, axis=(0, 1, 4))
    return grads.reshape(-1).astype(sinks.dtype)


def gradients(of_query: jax.Array, of_keys: KeyGradients, like: PyTree) -> PyTree:
    """Returns the gradients of query, key and value, untiled and in the dtypes of `like`."""
    joined = join_queries(of_query), join_keys(of_keys[0]), join_keys(of_keys[1])
    return tuple(x.astype(y.dtype) for x, y in zip(joined, like, strict=True))


def tiled_attention(
    cut: Callable[..., tuple[Queries, Any]],
    forward: Callable[[Any, Queries, Any, Running], Running],
    backward: Callable[[Any, Queries, Any, Cotangents], tuple[jax.Array, KeyGradients]],
) -> Callable[..., jax.Array]:
    """Returns `attend(how, query, key, value, segments, sinks)` of untiled arrays, where `how` is a
    static description.

    `cut(how, query, key, value, segments)` returns queries and what holds the keys.
    `forward(how, queries, keys, running)` returns the softmax with all keys included.
    `backward(how, queries, keys, cotangents)` returns the gradients of queries, keys and values.
    """

    def run(how, query, key, value, segments, sinks):
        queries, keys = cut(how, query, key, value, segments)
        running = forward(how, queries, keys, start(queries, value.shape[-1], sinks))
        output, log_mass = outputs(running, value.dtype)
        return output, (query, key, value, segments, sinks, output, log_mass)

    def pull(how, saved, grad):
        query, key, value, segments, sinks, output, log_mass = saved
        queries, keys = cut(how, query, key, value, segments)
        known = cotangents(grad, output, log_mass, key.shape[2], queries.query.shape[-2])
        of_query, of_keys = backward(how, queries, keys, known)
        of_arrays = gradients(of_query, of_keys, (query, key, value))
        return *of_arrays, (None, None), of_sinks(known, sinks)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def attend(how, query, key, value, segments, sinks) -> Any:
        return run(how, query, key, value, segments, sinks)[0]

    attend.defvjp(run, pull)
    return attend  # type: ignore[return-value]


def blockwise(
    query: Float[Array, "batch length heads head_dim"],
    key: Float[Array, "batch kv_length kv_heads head_dim"],
    value: Float[Array, "batch kv_length kv_heads value_dim"],
    segments: Segments = (None, None),
    sinks: Float[Array, " heads"] | None = None,
    *,
    mask: Mask,
) -> Float[Array, "batch length heads value_dim"]:
    """Returns attention of arrays that are whole on this device, as `attend` does. Values have dims
    of any number; segments are [batch, length] and [batch, kv_length] int32, or None."""
    return _attend(mask, query, key, value, segments, sinks)


def _tiled(mask, query, key, value, segments) -> tuple[Queries, Keys]:
    sizes = [needed_tile(tile_size(x.shape[1])) for x in (query, key)]
    at, kv_at = (
        cut_places(places(x.shape[1], None, ids), size)
        for x, ids, size in zip((query, key), segments, sizes, strict=True)
    )
    queries = Queries(cut_queries(query, key.shape[2], sizes[0]), at)
    return queries, Keys(cut_keys(key, sizes[1]), cut_keys(value, sizes[1]), kv_at)


def _forward(mask, queries, keys, running):
    return fold(running, queries, keys, mask)


def _backward(mask, queries, keys, known):
    zeros = jnp.zeros(queries.query.shape, jnp.float32)
    return pull_back(zeros, queries, keys, known, mask)


_attend = tiled_attention(_tiled, _forward, _backward)
