"""Retention of checkpoints: the newest, every n-th for good, and the best by a metric.

A run saves `"healthy": false` with a state that is not fit to go back to, because the run is in the
middle of updates that it rejects. These checkpoints count like all others, but the newest healthy
checkpoint is kept as well.
"""

from collections.abc import Container, Mapping

from shardlib.checkpoint.config import CheckpointConfig


def kept(
    metrics: Mapping[int, Mapping[str, float]],
    config: CheckpointConfig,
    unhealthy: Container[int] = (),
) -> set[int]:
    """Returns the steps that any of the policies keeps, and the newest healthy step.

    Args:
        metrics: The metrics saved with every existing checkpoint, by step.
        config: The policies. A tie between checkpoints goes to the newer one; a checkpoint without
            the metric is never the best.
        unhealthy: Steps that are not fit to go back to.
    """
    stay = set(sorted(metrics)[-config.keep :])
    stay |= set(sorted(step for step in metrics if step not in unhealthy)[-1:])
    if config.keep_every_steps is not None:
        stay |= {step for step in metrics if step % config.keep_every_steps == 0}
    if config.keep_best is not None:
        best = config.keep_best
        sign = -1 if best.mode == "min" else 1
        ranked = sorted(
            (step for step in metrics if best.metric in metrics[step]),
            key=lambda step: (sign * metrics[step][best.metric], step),
            reverse=True,
        )
        stay |= set(ranked[: best.count])
    return stay
