"""Which checkpoints stay: the newest, every n-th for good, and the best by a metric."""

from collections.abc import Mapping

from shardlib.checkpoint.config import CheckpointConfig


def kept(metrics: Mapping[int, Mapping[str, float]], config: CheckpointConfig) -> set[int]:
    """Returns the steps that any of the policies keeps.

    Args:
        metrics: By step of every checkpoint there is, the metrics saved with it.
        config: The policies. Of equally good checkpoints the newer is the better one; one without
            the metric is never the best.
    """
    stay = set(sorted(metrics)[-config.keep :])
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
