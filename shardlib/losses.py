"""Losses as weighted sums, exact under microbatches, padding and any sharding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Mean(NamedTuple):
    """A mean that is not divided yet: sums of microbatches add up to the mean of the batch."""

    total: jax.Array
    """Weighted sum, scalar float32."""
    weight: jax.Array
    """Sum of the weights, scalar float32."""

    @property
    def value(self) -> jax.Array:
        """`total / weight`; 0 where the weight is 0, so that a batch of padding has no gradient."""
        empty = self.weight == 0
        return jnp.where(empty, 0.0, self.total / jnp.where(empty, 1.0, self.weight))


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    mask: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the softmax cross-entropy over the labels that count, and its metrics.

    With p = softmax(logits), eps = `label_smoothing` and V classes, each position adds

        -(1 - eps) * log p[label] - eps / V * sum(log p) + z_loss * logsumexp(logits)**2

    Everything is computed in float32. The label's logit is picked by comparing an iota along V
    with the label and summing: no one-hot array is stored, and logits that are sharded along V
    stay so (a gather along a sharded dim would bring them together on every device).

    Args:
        logits: [..., V], any float dtype.
        labels: [...] integers in [0, V) where the mask is True; anything elsewhere.
        mask: [...] bool, the positions that count; None for all.
        label_smoothing: Probability spread evenly over all classes, in [0, 1).
        z_loss: Coefficient that keeps the log-normaliser near 0.

    Returns:
        The loss, and the metrics `nll_nats` (-log p[label], without smoothing and z-loss) and
        `accuracy` (the first largest logit is the label's), each a mean over the mask.

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

    # The label's logit is the largest and no class before it ties. A reduction of truth values is
    # several times faster than one that finds the position, such as argmax.
    tied_before = jnp.any((shifted == 0.0) & (classes < labels[..., None]), axis=-1)
    correct = ((label_shifted == 0.0) & ~tied_before).astype(jnp.float32)
    metrics = {"nll_nats": masked_mean(nll, mask), "accuracy": masked_mean(correct, mask)}
    return masked_mean(loss, mask), metrics


def masked_mean(values: jax.Array, mask: jax.Array | None = None) -> Mean:
    """Returns the mean of float32 `values` [...] where `mask` [...] is True, or of all."""
    if mask is None:
        return Mean(jnp.sum(values), jnp.float32(values.size))
    return Mean(jnp.sum(jnp.where(mask, values, 0.0)), jnp.sum(mask, dtype=jnp.float32))
