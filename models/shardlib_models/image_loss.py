"""The loss of models that classify images."""

from typing import Any

import jax

from shardlib.losses import Mean, cross_entropy


def loss(
    model: Any,
    batch: dict[str, Any],
    rng: jax.Array,
    *,
    train: bool,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean loss over the labelled images, and metrics.

    Args:
        model: A model for this step alone: it is put into training or evaluation mode.
        batch: `images` [batch, height, width, channels] of the parameters' dtype, and `labels`
            [batch] int32; a label below 0 keeps an image out of the loss.
        rng: Not used: dropout draws from the model's own streams.
        train: Whether dropout is on, and batch statistics come from the batch (and update the
            running ones).
        label_smoothing: See `shardlib.losses.cross_entropy`.
        z_loss: See `shardlib.losses.cross_entropy`.

    Returns:
        The loss; the metrics `accuracy` and `nll_nats`.
    """
    del rng
    if train:
        model.train()
    else:
        model.eval()
    labels = batch["labels"]
    logits = model(batch["images"])
    return cross_entropy(
        logits, labels, labels >= 0, label_smoothing=label_smoothing, z_loss=z_loss
    )
