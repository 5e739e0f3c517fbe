"""Losses as weighted sums, exact under microbatches, padding and any sharding."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from shardlib.errors import ModelError
from shardlib.losses.aggregate import Mean as Mean
from shardlib.losses.microbatch import widened
from shardlib.mesh import entry_axes
from shardlib.sharding.constrain import active
from shardlib.sharding.manual import axis_size, manual


def cross_entropy(
    logits: Float[Array, "*positions classes"],
    labels: Int[Array, "*positions"],
    mask: Bool[Array, "*positions"] | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the softmax cross-entropy over the unmasked labels, and its metrics.

    With p = softmax(logits), eps = `label_smoothing` and V classes, each position adds

        -(1 - eps) * log p[label] - eps / V * sum(log p) + z_loss * logsumexp(logits)**2

    Everything is computed in float32. The label's logit is selected by comparing an iota along V
    with the label and summing. No one-hot array is stored, and logits sharded along V stay sharded
    (indexing along a sharded dim would all-gather them on every device).

    Args:
        logits: Any float dtype.
        labels: In [0, classes) where the mask is True; any value elsewhere.
        mask: True for positions that count; None for all.
        label_smoothing: Probability spread evenly over all classes, in [0, 1).
        z_loss: Coefficient that keeps the log-normaliser near 0.

    Returns:
        The loss, and the metrics `nll_nats` (-log p[label], without smoothing and z-loss) and
        `accuracy` (the first largest logit is the label's), each averaged over the mask.

    Source: label smoothing, Szegedy et al. 2016, "Rethinking the Inception Architecture", sec. 7;
    z-loss, Chowdhery et al. 2022, "PaLM", sec. 5.
    """
    num_classes = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    shifted = logits - top
    log_sum = jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    is_label = classes == labels[..., None]
    label_shifted = jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1) - top[..., 0]
    nll = log_sum - label_shifted

    loss = nll
    if label_smoothing:
        spread = log_sum - jnp.sum(shifted, axis=-1) / num_classes
        loss = (1.0 - label_smoothing) * nll + label_smoothing * spread
    if z_loss:
        loss = loss + z_loss * jnp.square(log_sum + top[..., 0])

    # The label's logit is the largest, and no earlier class ties with it. A boolean reduction is
    # several times faster than a reduction that finds the position, such as argmax.
    tied_before = jnp.any((shifted == 0.0) & (classes < labels[..., None]), axis=-1)
    correct = ((label_shifted == 0.0) & ~tied_before).astype(jnp.float32)
    metrics = {"nll_nats": masked_mean(nll, mask), "accuracy": masked_mean(correct, mask)}
    return masked_mean(loss, mask), metrics


def chunked_cross_entropy(
    project: Callable[[Any, jax.Array], jax.Array],
    weights: PyTree,
    x: Float[Array, "batch length embed"],
    labels: Int[Array, "batch length"],
    mask: Bool[Array, "batch length"] | None = None,
    *,
    num_chunks: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the `cross_entropy` of `project(weights, x)`, computing logits chunk by chunk.

    The positions of a row are processed sequentially in `num_chunks` chunks, and the backward pass
    recomputes the logits of each chunk. At most [batch, length / num_chunks, V] of the logits
    [batch, length, V] exist at a time. Chunk `i` holds the positions `i, i + num_chunks, ...`, so
    devices that share a row hold equal parts of every chunk. Loss and gradients equal the unchunked
    ones up to the rounding of float32 sums.

    The weights are gathered once before the loop. Their gradient is accumulated in float32 on each
    device and reduced once after the loop. No weights are communicated within the loop.

    Args:
        project: `project(weights, x) -> logits`, from [batch, part, embed] to [batch, part, V].
            It must not close over arrays that are differentiated or sharded.
        weights: Pytree of arrays; on a mesh it may have any sharding.
        x: The inputs of `project`.
        labels: See `cross_entropy`.
        mask: None for all.
        num_chunks: Number of chunks; divides the part of the length on each device.
        label_smoothing: See `cross_entropy`.
        z_loss: See `cross_entropy`.

    Raises:
        ModelError: If `num_chunks` does not divide the number of positions of a row on a device.
    """
    if mask is None:
        mask = jnp.ones(labels.shape, bool)
    rows = _cut(x.shape[:2])
    _check_chunks(num_chunks, x.shape[1], rows)

    def of_chunk(weights: PyTree, x: jax.Array, labels: jax.Array, mask: jax.Array) -> PyTree:
        options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        loss, metrics = cross_entropy(project(weights, x), labels, mask, **options)
        return {**metrics, "loss": loss}

    on_rows = functools.partial(_sum_of_chunks, of_chunk, num_chunks)
    axes = (*entry_axes(rows[0]), *entry_axes(rows[1]))
    devices = _product(axes)
    # One copy per device along the axes: the compiler can then place their sum in the backward
    # pass. It cannot move a sum inside the manual region.
    copies = jax.tree.map(lambda w: jnp.broadcast_to(w[None], (devices, *w.shape)), weights)
    if axes:
        placed = (P(axes), P(*rows), P(*rows), P(*rows))
        on_rows = manual(on_rows, axes, in_specs=placed, out_specs=P(axes))
    metrics = jax.tree.map(jnp.sum, on_rows(copies, x, labels, mask))
    return metrics.pop("loss"), metrics


def _sum_of_chunks(
    of_chunk: Callable[..., PyTree],
    num_chunks: int,
    copies: PyTree,
    x: Float[Array, "batch length embed"],
    labels: Int[Array, "batch length"],
    mask: Bool[Array, "batch length"],
) -> PyTree:
    """Returns the sums of a device's chunks [1], from its own copy of the weights [1, ...]."""
    weights = jax.tree.map(lambda w: w[0], copies)
    wide = jax.tree.map(widened, weights)

    @jax.checkpoint
    def narrowed(wide: PyTree, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> PyTree:
        narrow = jax.tree.map(lambda w, like: w.astype(like.dtype), wide, weights)
        return of_chunk(narrow, *chunk)

    def add(sums: PyTree, chunk: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, narrowed(wide, chunk)), None

    chunks = jax.tree.map(lambda a: _strided(a, num_chunks), (x, labels, mask))
    shapes = jax.eval_shape(narrowed, wide, jax.tree.map(lambda c: c[0], chunks))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    sums, _ = jax.lax.scan(add, zeros, chunks)
    return jax.tree.map(lambda s: s[None], sums)


def _cut(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the entries of the PartitionSpec of [batch, length] under the active rules."""
    scope = active()
    if scope is None:
        return None, None
    spec = scope.sharding(("batch", "length"), shape, "activations").spec
    return spec[0], spec[1]


def _product(mesh_axes: tuple[str, ...]) -> int:
    return math.prod(axis_size(name) for name in mesh_axes)


def _check_chunks(num_chunks: int, length: int, rows: tuple[Any, Any]) -> None:
    parts = _product(entry_axes(rows[1]))
    if num_chunks < 1 or (length // parts) % num_chunks:
        held = f"{length} positions" + (f" in {parts} parts" if parts > 1 else "")
        raise ModelError(
            f"{num_chunks} chunks of the loss do not divide rows of {held}.\n"
            f"  Choose a number of chunks that divides {length // parts}; 1 takes rows whole."
        )


def _strided(x: jax.Array, n: int) -> jax.Array:
    """Returns [batch, length, ...] as [n, batch, length / n, ...], grouping every n-th position."""
    return jnp.moveaxis(x.reshape(x.shape[0], x.shape[1] // n, n, *x.shape[2:]), 2, 0)


def masked_mean(
    values: Float[Array, "*positions"], mask: Bool[Array, "*positions"] | None = None
) -> Mean:
    """Returns the mean of float32 `values` where `mask` is True; None for all."""
    if mask is None:
        return Mean(jnp.sum(values), jnp.float32(values.size))
    return Mean(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32))
