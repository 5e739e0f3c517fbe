"""Fit of the cost model's constants to measured steps, with priors from datasheets.

The fit minimises, over the logarithms of the constants,

    sum over runs       of  w huber(log(predicted / measured) / s)
    + sum over constants of (log(c / prior) / spread)^2

by Gauss-Newton with numerical derivatives and the weights of Huber (1964), "Robust Estimation of a
Location Parameter", so that single bad records pull little. A family of many runs weighs as the
`sqrt` of their number, because its runs share the unmodelled properties of their software. A
constant that no run depends on keeps its prior.
"""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from published import Case
from shardlib.cost.machine.constants import PRIORS
from shardlib.cost.transformer.step_time import step_time

_NOISE = 0.06
"""Standard deviation of the logarithm of a step time that no constant explains."""
_BEND = 1.5
"""Multiple of the scatter beyond which residuals weigh less."""
_STEP = 1e-3


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants and the standard errors of their logarithms."""

    constants: dict[str, float]
    errors: dict[str, float]
    median_error: float
    p90_error: float
    cases: int


def calibrate(
    cases: Sequence[Case], start: Mapping[str, float] | None = None, *, rounds: int = 12
) -> Fit:
    """Returns the constants that best fit measured cases.

    Args:
        cases: Runs on any chips. The caller has to drop runs in 8-bit precision.
        start: Start of the search; default the priors.
        rounds: Gauss-Newton steps.
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
    """Returns the relative error of the predicted step time of a case."""
    predicted = step_time(case.job, case.layout, case.cluster, case.software, constants)
    return predicted.total / case.seconds - 1


def cross_validate(
    cases: Sequence[Case], known: Sequence[Case], start: Mapping[str, float]
) -> dict[str, float]:
    """Returns the error of each case by its id, predicted with constants fitted to `known` cases
    without the whole family of the case.

    Args:
        cases: Cases to predict.
        known: Cases to fit to; they may be the same.
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


def interval(cases: Sequence[Case], validated: Mapping[str, float]) -> float:
    """Returns the half-width of the 90% prediction interval, as a fraction of the time.

    It is the 90th percentile of the absolute errors of `cross_validate`. As in the fit, a family
    weighs as the square root of its number of runs, so that no family alone decides.
    """
    found = [case for case in cases if case.id in validated]
    counts = collections.Counter(case.family for case in found)
    sizes = [abs(validated[case.id]) for case in found]
    weights = [counts[case.family] ** -0.5 for case in found]
    return float(np.quantile(sizes, 0.9, weights=weights, method="inverted_cdf"))


def coverage(cases: Sequence[Case], validated: Mapping[str, float]) -> float:
    """Returns the fraction of cases whose error of `cross_validate` lies within the interval that
    the other families give."""
    inside = 0
    for family in {case.family for case in cases}:
        others = interval([case for case in cases if case.family != family], validated)
        inside += sum(abs(validated[case.id]) <= others for case in cases if case.family == family)
    return inside / len(cases)


def save(
    fit: Fit, path: Path, cases: Sequence[Case] = (), validated: Mapping[str, float] | None = None
) -> None:
    """Writes the constants with their errors, priors and sources as JSON.

    Args:
        fit: Fit to write.
        path: Path of the file.
        cases: Cases of the fit.
        validated: Their errors of `cross_validate`; median, 90th percentile and `interval` are
            stored.
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
        errors["cv_interval"] = interval(cases, validated)
    rounded = {name: round(value, 4) for name, value in errors.items()}
    record = {"fit": {"cases": fit.cases, **rounded}, "constants": constants}
    path.write_text(json.dumps(record, indent=2) + "\n")


def _misses(
    cases: Sequence[Case], names: Sequence[str], at: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logarithms of predicted over measured times, [cases], and their derivatives,
    [cases, names]."""

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
