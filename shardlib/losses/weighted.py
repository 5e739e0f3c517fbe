"""Losses as weighted sums, exact under microbatches, padding and any sharding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from shardlib.losses.aggregate import Mean as Mean


class Statistics(NamedTuple):
    """What the loss needs of the logits of some classes, at each position."""

    top: Float[Array, "*positions"]
    """The largest logit, a constant under differentiation."""
    exp_sum: Float[Array, "*positions"]
    """The sum of exp(logit - top)."""
    label: Float[Array, "*positions"]
    """The logit of the label; 0 if it is another class."""
    tied: Bool[Array, "*positions"]
    """Whether a class before the label has the logit `top`."""
    shifted_sum: Float[Array, "*positions"] | None
    """The sum of logit - top; None if it was not asked for."""


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
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    found = statistics(logits, labels, classes, with_sum=bool(label_smoothing))
    # Else XLA for GPUs computes some of them in one kernel with the gradient of the logits, which
    # then cannot take the memory of the logits.
    found = jax.lax.optimization_barrier(found)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    return loss_of(found, logits.shape[-1], mask, **options)


def statistics(
    logits: Float[Array, "*positions classes"],
    labels: Int[Array, "*#positions"],
    classes: Int[Array, "*#positions classes"],
    *,
    counted: Bool[Array, " classes"] | None = None,
    top: Float[Array, "*positions"] | None = None,
    with_sum: bool,
) -> Statistics:
    """Returns the statistics of the logits of some classes.

    Args:
        logits: Any float dtype.
        labels: Any values.
        classes: The class of each logit.
        counted: False for logits that count nowhere, of which there is another; None if all count.
        top: The largest logits, where they are known; None to find them.
        with_sum: Whether to sum the logits.
    """
    logits = logits.astype(jnp.float32)
    is_label = classes == labels[..., None]
    if counted is not None:
        counted = jnp.expand_dims(counted, range(logits.ndim - 1))
        logits, is_label = jnp.where(counted, logits, -jnp.inf), is_label & counted
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1)) if top is None else top
    shifted = logits - top[..., None]
    # A boolean reduction is several times faster than a reduction that finds the position, such as
    # argmax.
    tied = jnp.any((shifted == 0.0) & (classes < labels[..., None]), axis=-1)
    return Statistics(
        top,
        jnp.sum(jnp.exp(shifted), axis=-1),
        jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1),
        tied,
        jnp.sum(shifted, axis=-1, where=counted) if with_sum else None,
    )


def loss_of(
    found: Statistics,
    num_classes: int,
    mask: Bool[Array, "*positions"] | None,
    *,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns what `cross_entropy` returns, from the statistics of all classes."""
    log_sum = jnp.log(found.exp_sum)
    label_shifted = found.label - found.top
    nll = log_sum - label_shifted
    loss = nll
    if label_smoothing:
        assert found.shifted_sum is not None
        spread = log_sum - found.shifted_sum / num_classes
        loss = (1.0 - label_smoothing) * nll + label_smoothing * spread
    if z_loss:
        loss = loss + z_loss * jnp.square(log_sum + found.top)
    # The label's logit is the largest, and no earlier class ties with it.
    correct = ((label_shifted == 0.0) & ~found.tied).astype(jnp.float32)
    metrics = {"nll_nats": masked_mean(nll, mask), "accuracy": masked_mean(correct, mask)}
    return masked_mean(loss, mask), metrics


def masked_mean(
    values: Float[Array, "*positions"], mask: Bool[Array, "*positions"] | None = None
) -> Mean:
    """Returns the mean of float32 `values` where `mask` is True; None for all."""
    if mask is None:
        return Mean(jnp.sum(values), jnp.float32(values.size))
    return Mean(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32))
