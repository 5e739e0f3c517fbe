"""Metrics at Weights & Biases."""

from collections.abc import Mapping
from typing import Any

from shardlib.errors import require
from shardlib.log.loggers import RunInfo


class WandbLogger:
    """A metrics logger that writes to a run of Weights & Biases.

    All attempts at a run continue one run there. A W&B run that is already active is used, and
    left active. The metrics have `step` as their axis. W&B keeps what it has: a repeated step
    appears twice, and the later value holds; the summary names the last `rewound_to` step.

    Args:
        options: Arguments of `wandb.init`, such as `project`. Its environment variables, such as
            WANDB_PROJECT and WANDB_MODE=offline, apply too.

    Raises:
        MissingExtraError: If wandb is not installed.
    """

    def __init__(self, **options: Any):
        self._wandb = require("wandb", "wandb", "WandbLogger")
        self._options = options

    def start(self, run: RunInfo) -> None:
        """Begins or continues the W&B run, and records the config."""
        self._is_own = self._wandb.run is None
        given = {"dir": str(run.run_dir), "name": run.run_dir.name, "id": run.identity}
        self._run = self._wandb.init(**{**given, "resume": "allow", **self._options})
        self._run.config.update(dict(run.config), allow_val_change=True)
        # W&B counts steps itself and refuses smaller ones, which follow a rewind.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics to the process of W&B, which sends them."""
        self._run.log({**metrics, "step": step})

    def rewind(self, step: int) -> None:
        """Notes the step in the summary of the W&B run."""
        self._run.summary["rewound_to"] = step

    def close(self, failed: bool) -> None:
        """Ends the W&B run, and waits until its data is sent."""
        if self._is_own:
            self._run.finish(exit_code=int(failed))
