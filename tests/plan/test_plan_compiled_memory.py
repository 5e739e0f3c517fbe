"""Predicted peaks of steps against those that XLA gives, as `benchmarks/plan_memory.py` stores."""

import importlib.util
import statistics
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.docs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_memory", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scores(benchmark):
    found = benchmark.scored(benchmark.STORED.load()["cells"])
    assert len(found) == len(benchmark.CELLS)
    return found


def test_peaks_are_predicted(scores):
    errors = [abs(score.error) for score in scores]
    assert statistics.median(errors) < 0.03
    assert np.quantile(errors, 0.9) < 0.08


def test_peaks_are_predicted_of_cells_that_no_rule_was_read_from(benchmark, scores):
    errors = [abs(score.error) for score in scores if score.cell not in benchmark.READ]
    assert len(errors) >= 20
    assert statistics.median(errors) < 0.04
    assert np.quantile(errors, 0.9) < 0.09


def test_nothing_is_said_to_fit_that_does_not(benchmark, scores):
    close = [s for s in scores if 0.85 < s.compiled["peak"] / s.usable < 1.3]
    assert len(close) >= 10
    assert len([s for s in scores if not s.fits]) >= 3
    assert benchmark.summary(scores)["wrongly_fitting"] == []


def test_cells_cover_chips_models_and_remat(scores):
    cells = [score.cell for score in scores]
    assert {cell.cluster.chip.name for cell in cells} == {"h100", "v5e", "v5p", "v6e"}
    assert {"llama3.2-1b", "llama3-405b", "mixtral-8x7b"} <= {cell.model for cell in cells}
    assert {"none", "dots", "full"} <= {cell.remat for cell in cells}
