"""Metrics at MLflow."""

import collections
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from shardlib.config.dump import inline
from shardlib.errors import require
from shardlib.log.loggers import RunInfo

_IDENTITY_TAG = "shardlib.run_id"
# The limits of one request: https://mlflow.org/docs/latest/rest-api.html, "Log Batch".
_MAX_METRICS, _MAX_PARAMS = 1000, 100


class MLflowLogger:
    """A metrics logger that writes to a run of MLflow.

    MLflow itself chooses the server and the experiment: by `mlflow.set_experiment(...)`, or by the
    environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. All attempts at a run
    continue one run of the experiment. An MLflow run that is already active is used, and left
    active. MLflow keeps what it has: a repeated step has two values, and the later one holds; the
    tag `shardlib.rewound_to` names the last step that the run went back to.

    A thread sends the metrics, so that the training loop does not wait for the server.

    Raises:
        MissingExtraError: If mlflow is not installed.
    """

    def __init__(self) -> None:
        self._mlflow = require("mlflow", "mlflow", "MLflowLogger")
        self._waiting: collections.deque[Any] = collections.deque()

    def start(self, run: RunInfo) -> None:
        """Begins or continues the MLflow run, and records the config as its parameters."""
        active = self._mlflow.active_run()
        self._is_own = active is None
        active = active or self._begun(run)
        self._client = self._mlflow.MlflowClient()
        self._run_id = active.info.run_id
        self._record(_flat(run.config), active.data.params)
        self._pool = ThreadPoolExecutor(1, "shardlib-mlflow")
        self._sent: Future[None] = self._pool.submit(self._send)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hands the metrics to the thread; raises the error of an earlier step, if any."""
        now = int(1000 * time.time())
        metric = self._mlflow.entities.Metric
        self._waiting.extend(metric(_key(name), x, now, step) for name, x in metrics.items())
        if self._sent.done():
            self._sent.result()
            self._sent = self._pool.submit(self._send)

    def rewind(self, step: int) -> None:
        """Notes the step in a tag."""
        self._client.set_tag(self._run_id, "shardlib.rewound_to", str(step))

    def close(self, failed: bool) -> None:
        """Sends the remaining metrics and ends the MLflow run."""
        try:
            self._sent.result()
            self._send()
        finally:
            self._pool.shutdown()
            if self._is_own:
                self._mlflow.end_run("FAILED" if failed else "FINISHED")

    def _begun(self, run: RunInfo) -> Any:
        """Returns the MLflow run of an earlier attempt, or a new one, which is then active."""
        if run.identity is None:
            return self._mlflow.start_run(run_name=run.run_dir.name)
        runs = self._mlflow.search_runs(
            filter_string=f"tags.`{_IDENTITY_TAG}` = '{run.identity}'",
            max_results=1,
            output_format="list",
        )
        if runs:
            return self._mlflow.start_run(run_id=runs[0].info.run_id)
        tags = {_IDENTITY_TAG: run.identity}
        return self._mlflow.start_run(run_name=run.run_dir.name, tags=tags)

    def _record(self, config: Mapping[str, str], recorded: Mapping[str, str]) -> None:
        """Records a config. MLflow never changes a parameter: a new value becomes a tag."""
        entities = self._mlflow.entities
        params = [entities.Param(name, x) for name, x in config.items() if name not in recorded]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])
        for name, value in config.items():
            if recorded.get(name, value) != value:
                self._client.set_tag(self._run_id, f"shardlib.now.{name}", value)

    def _send(self) -> None:
        while count := min(len(self._waiting), _MAX_METRICS):
            batch = [self._waiting.popleft() for _ in range(count)]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=True)


def _flat(config: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """Returns the scalars and lists of a config as YAML, by path such as `model.num_layers`."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[_key(f"{path}{name}")] = inline(value)
    return flat


def _key(name: str) -> str:
    """Returns a name with the characters that MLflow refuses, such as `*`, as underscores."""
    return re.sub(r"[^\w\-. :/]", "_", name)
