"""Fits to timings of a machine: lines for data movement, a kernel model for matmuls."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from shardlib.cost.machine.kernels import matmul
from shardlib.cost.machine.measured import Line, MatmulFit, Timed
from shardlib.cost.machine.rates import Rates

_FAR = 0.3
_PULL = 1e-2


def fit_line(points: Sequence[Timed]) -> Line:
    """Returns the line through measured operations by their bytes, the last entry of `size`.

    The fit minimises the squared relative errors. Neither the start nor the time per byte is
    negative.
    """
    sizes = np.array([point.size[-1] for point in points], float)
    seconds = np.array([point.seconds for point in points])
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    (start, per_byte), *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
    if start <= 0 or per_byte <= 0:
        # Noise dominates: fit the rate alone.
        start, per_byte = 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    predicted = start + sizes * per_byte
    error = float(np.median(np.abs(predicted / seconds - 1)))
    return Line(float(start), float(1 / per_byte), error)


def fit_matmul(points: Sequence[Timed], memory: Line) -> MatmulFit:
    """Returns the rate, fill and start-up with which `kernels.matmul` fits measured matmuls."""
    seconds = np.array([point.seconds for point in points])
    blank = Rates(
        **dict.fromkeys((field.name for field in dataclasses.fields(Rates)), 0)  # type: ignore[arg-type]
    )

    def predicted(logs: np.ndarray) -> np.ndarray:
        flops, fill, start = np.exp(logs)
        rates = dataclasses.replace(
            blank,
            flops=flops,
            fill=fill,
            kernel_seconds=start,
            memory=memory.bytes_per_second,
            tile=1,
        )
        return np.array([matmul(*p.size[:3], width=p.size[3]).seconds(rates) for p in points])

    # A quantile, so that a single wrong point does not set the starting rate.
    best = float(np.quantile([2 * math.prod(p.size[:3]) / p.seconds for p in points], 0.8))
    start = np.log([best, 8.0, seconds.min() / 2])
    logs, error = _fitted(predicted, start, seconds)
    flops, fill, overhead = np.exp(logs)
    return MatmulFit(float(flops), float(fill), float(overhead), error)


def _fitted(
    predicted: Callable[[np.ndarray], np.ndarray], logs: np.ndarray, seconds: np.ndarray
) -> tuple[np.ndarray, float]:
    """Returns the least-squares fit of the logarithms and its median relative error, with a weak
    pull towards the start. Residuals beyond `_FAR` pull no harder than a residual of `_FAR` (Huber
    1964)."""
    import scipy.optimize

    def misses(at: np.ndarray) -> np.ndarray:
        pull = math.sqrt(_PULL) * (at - logs)
        return np.concatenate([np.log(predicted(at)) - np.log(seconds), pull])

    parameters = scipy.optimize.least_squares(misses, logs, loss="huber", f_scale=_FAR).x
    return parameters, float(np.median(np.abs(predicted(parameters) / seconds - 1)))
