"""What a run writes down of itself: one JSON object a step, TensorBoard events, and its rates.

`metrics.jsonl` holds one object per line with the keys `step`, `loss`, `grad_norm`,
`learning_rate`, `tokens_per_second` (or `images_per_second`), `step_seconds`,
`data_wait_seconds`, `mfu`, and others such as `eval/loss` at the steps that have them. `null` means
that there is no value (the peak of the device is not known). JSON has no NaN and no infinity: such
a value is written as `null`, and under `nonfinite` by its name, `{"loss": "nan"}`.
"""

import collections
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError, require

METRICS_FILE = "metrics.jsonl"
EVENTS_DIRECTORY = "tensorboard"


class MetricsWriter:
    """Appends the metrics of a run to its directory. Only one process of a run has one.

    Lines are flushed one by one, so that others can follow the file. Steps are unique and
    increase: when a run resumes, the lines of steps after its checkpoint are removed first.

    Args:
        run_dir: The directory of the run, which exists.
        tensorboard: Whether to write event files to `run_dir/tensorboard` too.
        resume_step: The step of the checkpoint that the run continues from; 0 for a new run.

    Raises:
        MissingExtraError: If tensorboardX is asked for and absent.
        ShardlibError: If the file that is there holds a line which is not a step's metrics.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str], *, tensorboard: bool = False, resume_step: int = 0
    ):
        self._events = None
        board = (
            require("tensorboardX", "tensorboard", "train.tensorboard=true")
            if tensorboard
            else None
        )
        self.path = Path(run_dir) / METRICS_FILE
        self._last_step = _drop_after(self.path, resume_step)
        self._file = open(self.path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        if board is not None:
            # TensorBoard hides the events of a lost tail: those at `purge_step` and after.
            self._events = board.SummaryWriter(
                str(Path(run_dir) / EVENTS_DIRECTORY), purge_step=resume_step + 1
            )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of one step: numbers (also 0-d arrays) or None by name.

        Raises:
            ValueError: If the step does not come after the last one written.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step} come after those of step {self._last_step}")
        self._last_step = step
        values = {name: _number(value) for name, value in metrics.items()}
        self._file.write(_line(step, values) + "\n")
        if self._events is not None:
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files; what was written stays."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the metrics of a run, one dict a step, with non-finite values as floats again.

    Empty where the run has written none. A last line that was cut off is left out.

    Raises:
        ShardlibError: If another line is not a step's metrics.
    """
    path = Path(run_dir) / METRICS_FILE
    return [_restored(row) for row, _ in _rows(path)]


def _rows(path: Path) -> list[tuple[dict[str, Any], str]]:
    """Returns every complete line, parsed and as it stands."""
    if not path.exists():
        return []
    rows = []
    # Split at line feeds alone: `splitlines` would also cut at separators inside of strings.
    *lines, tail = path.read_text(encoding="utf-8").split("\n")
    del tail  # Empty, or a line that was being written when the process ended.
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            assert isinstance(row["step"], int)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise ShardlibError(
                f"{path}:{number}: not the metrics of a step: {line[:60]!r}.\n"
                f"  Remove that line, or move the file away to begin a new one."
            ) from None
        rows.append((row, line))
    return rows


def _drop_after(path: Path, step: int) -> int:
    """Removes the lines after a step, atomically; returns the last step that is left, or 0."""
    rows = _rows(path)
    kept = [(row, line) for row, line in rows if row["step"] <= step]
    text = "".join(line + "\n" for _, line in kept)
    if path.exists() and len(text.encode()) != path.stat().st_size:
        beside = path.with_name(path.name + ".tmp")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    return max((row["step"] for row, _ in kept), default=0)


def _number(value: Any) -> float | int | None:
    if value is None or isinstance(value, bool | int):
        return value
    return float(value)


def _line(step: int, values: Mapping[str, float | int | None]) -> str:
    wrong = {n: str(float(v)) for n, v in values.items() if v is not None and not math.isfinite(v)}
    row: dict[str, Any] = {"step": step} | {n: None if n in wrong else v for n, v in values.items()}
    if wrong:
        row["nonfinite"] = wrong
    return json.dumps(row, allow_nan=False)


def _restored(row: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: value for name, value in row.items() if name != "nonfinite"},
        **{name: float(text) for name, text in row.get("nonfinite", {}).items()},
    }


class StepTimer:
    """Seconds a step, measured on the host alone: it never waits for a device.

    Call `tick` whenever a step is known to be finished, for example when its metrics have been
    read a step late. In a loop that keeps the device busy, ticks are as far apart as steps are
    long. The first interval, which compiles, is reported but takes no part in the mean.

    Args:
        window: How many of the latest steps the mean is taken over.
        clock: Monotonic seconds.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._intervals: collections.deque[float] = collections.deque(maxlen=window)
        self._last = clock()
        self._ticks = 0

    def tick(self) -> float:
        """Returns the seconds since the last `tick`, `restart` or the making of this timer."""
        now = self._clock()
        interval, self._last = now - self._last, now
        self._ticks += 1
        if self._ticks > 1:
            self._intervals.append(interval)
        return interval

    def restart(self) -> None:
        """Forgets the time since the last tick: an evaluation, a checkpoint, a sample of text."""
        self._last = self._clock()

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean over the window, or None before the second step."""
        return sum(self._intervals) / len(self._intervals) if self._intervals else None


def mfu(
    flops_per_step: float, step_seconds: float | None, peak_flops_total: float | None
) -> float | None:
    """Returns the model-FLOPs utilisation in [0, 1], or None where a term is not known.

    Args:
        flops_per_step: Model FLOPs of one step, forward and backward, recomputation not counted.
        step_seconds: Wall seconds of one step.
        peak_flops_total: Peak FLOP/s of all devices together in the dtype of the matmuls.

    Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B.
    """
    if not step_seconds or not peak_flops_total:
        return None
    return flops_per_step / step_seconds / peak_flops_total
