"""Fits the constants of the cost model to measured steps, held to what datasheets lead to expect.

Minimised over the logarithms of the constants is

    sum over runs       of  w huber(log(predicted / measured) / s)
    + sum over constants of (log(c / prior) / spread)^2

by Gauss-Newton with the derivatives taken numerically and the weights of Huber (1964), "Robust
Estimation of a Location Parameter", so that single bad records pull little. A family of many runs
weighs as `sqrt` of their number: its runs share what the model does not know of their software.
A constant that no run depends on keeps its prior.
"""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shardlib.plan.constants import PRIORS
from shardlib.plan.cost import step_time
from shardlib.plan.published import Case

_NOISE = 0.06
"""Scatter of the logarithm of a step time that no constant explains."""
_BEND = 1.5
"""Residuals beyond this many times the scatter weigh less."""
_STEP = 1e-3


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants, with the standard error of their logarithms."""

    constants: dict[str, float]
    errors: dict[str, float]
    median_error: float
    p90_error: float
    cases: int


def calibrate(
    cases: Sequence[Case], start: Mapping[str, float] | None = None, *, rounds: int = 12
) -> Fit:
    """Returns the constants that fit measured cases best.

    Args:
        cases: Runs of any chips; those of 8-bit precision are left to the caller to drop.
        start: Where the search starts; the priors by default.
        rounds: Steps of Gauss-Newton.
    """
    names = list(PRIORS)
    expected = np.log([PRIORS[name].value for name in names])
    spreads = np.array([PRIORS[name].spread for name in names])
    at = expected.copy() if start is None else np.log([start[name] for name in names])
    counts = collections.Counter(case.family for case in cases)
    weights = np.array([counts[case.family] ** -0.5 for case in cases])
    inverse = np.diag(spreads**2)
    for _ in range(rounds):
        misses, slopes = _misses(cases, names, at)
        bent = weights * np.minimum(1, _BEND * _NOISE / np.maximum(np.abs(misses), 1e-9))
        pull = slopes.T * (bent / _NOISE**2)
        inverse = np.linalg.inv(pull @ slopes + np.diag(spreads**-2.0))
        move = inverse @ (-pull @ misses - (at - expected) / spreads**2)
        at = at + np.clip(move, -0.3, 0.3)
    constants = {name: float(f"{math.exp(x):.4g}") for name, x in zip(names, at, strict=True)}
    found = sorted(abs(error(case, constants)) for case in cases)
    return Fit(
        constants,
        {name: float(x) for name, x in zip(names, np.sqrt(np.diag(inverse)), strict=True)},
        statistics.median(found),
        percentile(found, 0.9),
        len(cases),
    )


def error(case: Case, constants: Mapping[str, float]) -> float:
    """Returns the predicted over the published step time of a case, less one."""
    predicted = step_time(case.job, case.layout, case.cluster, case.software, constants)
    return predicted.total / case.seconds - 1


def cross_validate(
    cases: Sequence[Case], known: Sequence[Case], start: Mapping[str, float]
) -> dict[str, float]:
    """Returns the error of each case by its id, predicted with constants fitted to `known` cases
    without the case's whole family.

    Args:
        cases: To predict.
        known: To fit to; they may be the same.
        start: Constants fitted to all of `known`.
    """
    found = {}
    for family in sorted({case.family for case in cases}):
        others = [case for case in known if case.family != family]
        constants = start
        if 0 < len(others) < len(known):
            constants = calibrate(others, start, rounds=6).constants
        found |= {case.id: error(case, constants) for case in cases if case.family == family}
    return found


def percentile(values: Sequence[float], fraction: float) -> float:
    """Returns the value below which a fraction of sorted values lie, interpolated."""
    return float(np.quantile(np.asarray(values), fraction))


def save(fit: Fit, path: Path, validated: Mapping[str, float] | None = None) -> None:
    """Writes the constants with their errors, priors and sources as JSON.

    Args:
        fit: What to write.
        path: The file.
        validated: Errors of `cross_validate`, of which the median and the 90th percentile are kept.
    """
    constants = {
        name: {
            "value": value,
            "log_error": float(f"{fit.errors[name]:.2g}"),
            "prior": PRIORS[name].value,
            "source": PRIORS[name].source,
        }
        for name, value in fit.constants.items()
    }
    errors = {"median_error": fit.median_error, "p90_error": fit.p90_error}
    if validated:
        sizes = sorted(map(abs, validated.values()))
        errors["cv_median_error"] = statistics.median(sizes)
        errors["cv_p90_error"] = percentile(sizes, 0.9)
    rounded = {name: round(value, 4) for name, value in errors.items()}
    record = {"fit": {"cases": fit.cases, **rounded}, "constants": constants}
    path.write_text(json.dumps(record, indent=2) + "\n")


def _misses(
    cases: Sequence[Case], names: Sequence[str], at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of predicted over measured, [cases], and their derivatives, [cases, names]."""

    def predicted(logs: np.ndarray) -> np.ndarray:
        constants = dict(zip(names, np.exp(logs).tolist(), strict=True))
        times = (step_time(c.job, c.layout, c.cluster, c.software, constants) for c in cases)
        return np.log([time.total for time in times])

    here = predicted(at)
    slopes = np.empty((len(cases), len(names)))
    for column in range(len(names)):
        there = at.copy()
        there[column] += _STEP
        slopes[:, column] = (predicted(there) - here) / _STEP
    return here - np.log([case.seconds for case in cases]), slopes
