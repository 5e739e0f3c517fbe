"""Metrics of a run: one JSON object per step, and rates.

`metrics.jsonl` holds one object per line with the keys `step`, `loss`, `grad_norm`,
`learning_rate`, `tokens_per_second` (or `images_per_second`), `step_seconds`,
`data_wait_seconds`, `mfu`, and others such as `eval/loss` at the steps that have them. `null` means
that the value is missing (for example, `mfu` if the peak FLOP/s of the device is unknown). JSON has
no NaN or infinity: a non-finite value is written as `null`, and listed under `nonfinite` by name,
as in `{"loss": "nan"}`.

Three keys hold the account of the run's time up to a step (see `goodput.py`): `time`, in seconds
since 1970; `goodput`, in [0, 1]; and `spent`, an object of seconds by share since the run first
began, over all attempts. The shares are `init`, `compile`, `data_wait`, `step`, `evaluate`, `save`,
`restore`, `lost` and `idle`; zero shares are omitted. Rows without these keys are accepted.
"""

import collections
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError
from shardlib.log.durable_log import AppendFile, encode, entries, foreign

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Appends the metrics of a run to its directory. Only one process of a run may have a writer.

    Lines are flushed one by one, so that others can follow the file. Steps are unique and
    increase: when a run resumes, the lines of steps after its checkpoint are removed first. A full
    disk delays lines but raises no error: see `AppendFile`.

    Args:
        run_dir: The directory of the run, which exists.
        resume_step: The step of the checkpoint that the run resumes from; 0 for a new run.
        warn: Called when lines cannot be written, and with each line that is not a step's metrics.

    Attributes:
        kept: The last remaining row of an earlier attempt, as in `read_metrics`, or None.
        last: The last row found in the file, even if it was then removed, or None.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        resume_step: int = 0,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.path = Path(run_dir) / METRICS_FILE
        text = self.path.read_bytes() if self.path.exists() else b""
        rows = _rows(self.path, text, lambda fault: warn(f"{fault} The line is passed over."))
        size, self.kept = _up_to(rows, resume_step)
        self.last = rows[-1][0] if rows else None
        self._last_step = self.kept["step"] if self.kept else 0
        self._file = AppendFile(self.path, size=size, warn=warn)

    def write(
        self, step: int, metrics: Mapping[str, Any], account: Mapping[str, Any] | None = None
    ) -> None:
        """Writes the metrics of one step: numbers (including 0-d arrays) or None by name.

        Raises:
            ValueError: If the step is not after the last written step.
        """
        if step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} follow step {self._last_step}: steps must increase"
            )
        self._last_step = step
        values = {name: _number(value) for name, value in metrics.items()}
        self._file.write(encode({"step": step, **values, **(account or {})}))

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Removes the rows of later steps, which are repeated; returns the last remaining row."""
        size, kept = _up_to(_rows(self.path, self._file.read(), lambda line: None), step)
        self._file.cut(size)
        self._last_step = kept["step"] if kept else 0
        return kept

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _refuse(fault: str) -> None:
    raise ShardlibError(f"{fault}\n  Remove that line, or move the file away to start a new one.")


def read_metrics(
    run_dir: str | os.PathLike[str], *, on_fault: Callable[[str], None] = _refuse
) -> list[dict[str, Any]]:
    """Returns the metrics of a run, one dict per step, with non-finite values as floats.

    The list is empty if the run has no metrics file. A truncated last line is dropped. `on_fault`
    is called with the fault of each other line that is not a step's metrics; by default it raises
    `ShardlibError`.
    """
    path = Path(run_dir) / METRICS_FILE
    return [row for row, _ in _rows(path, path.read_bytes(), on_fault)] if path.exists() else []


def _is_row(row: Mapping[str, Any]) -> bool:
    spent = row.get("spent", {})
    account = [row.get("time", 0), *(spent.values() if isinstance(spent, dict) else [spent])]
    is_account = all(isinstance(number, int | float) for number in account)
    return isinstance(row.get("step"), int) and is_account


def _rows(
    path: Path, text: bytes, on_fault: Callable[[str], None]
) -> list[tuple[dict[str, Any], int]]:
    """Returns the object and the end offset of every complete line.

    `on_fault` gets the fault of each line that is not the metrics of a step.
    """
    rows, end = [], 0
    for number, line, row in entries(text, _is_row):
        end += len(line) + 1
        if row is None:
            on_fault(foreign(path, number, line, "the metrics of a step"))
        else:
            rows.append((row, end))
    return rows


def _up_to(
    rows: Sequence[tuple[dict[str, Any], int]], step: int
) -> tuple[int, dict[str, Any] | None]:
    """Returns the size in bytes of the lines up to a step, and the last of their rows."""
    kept: tuple[int, dict[str, Any] | None] = (0, None)
    for row, end in rows:
        if row["step"] > step:
            break
        kept = end, row
    return kept


def _number(value: object) -> float | int | None:
    if value is None or isinstance(value, bool | int):
        return value
    return float(value)  # type: ignore[arg-type]


class StepTimer:
    """A timer of steps on the host, which never waits for a device.

    Call `tick` whenever a step is known to be finished, for example when its metrics have been read
    one step late. In a loop that keeps the device busy, the interval between ticks is the step
    time. The first interval includes compilation: it is reported but excluded from the mean. The
    mean is of the latest `window` steps; `clock` returns monotonic seconds.
    """

    def __init__(self, window: int = 20, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._intervals: collections.deque[float] = collections.deque(maxlen=window)
        self._last = clock()
        self._ticks = 0

    def tick(self) -> float:
        """Returns the seconds since the last `tick` or `restart`, or since construction."""
        now = self._clock()
        interval, self._last = now - self._last, now
        self._ticks += 1
        if self._ticks > 1:
            self._intervals.append(interval)
        return interval

    def restart(self) -> None:
        """Discards the time since the last tick, for example of an evaluation or a checkpoint."""
        self._last = self._clock()

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean seconds per step over the window; None before the second step."""
        return sum(self._intervals) / len(self._intervals) if self._intervals else None


def mfu(
    flops_per_step: float | None, step_seconds: float | None, peak_flops_total: float | None
) -> float | None:
    """Returns the model-FLOPs utilisation in [0, 1], or None if an argument is unknown. FLOPs are
    of one step, forward and backward, without recomputation; the peak is of all devices, in the
    dtype of the matmuls.

    Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B.
    """
    if not flops_per_step or not step_seconds or not peak_flops_total:
        return None
    return flops_per_step / step_seconds / peak_flops_total
