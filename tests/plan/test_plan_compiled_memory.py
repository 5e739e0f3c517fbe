"""Predicted peaks of steps against those that XLA gives, as `benchmarks/plan_memory.py` stores."""

import importlib.util
import statistics
from pathlib import Path

import numpy as np
import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"


@pytest.fixture(scope="module")
def scores():
    spec = importlib.util.spec_from_file_location("plan_memory", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.scored(module.stored()["cells"])
    assert len(found) == len(module.CELLS) == 40
    return found


def test_peaks_are_predicted(scores):
    errors = [abs(score.error) for score in scores]
    assert statistics.median(errors) < 0.03
    assert np.quantile(errors, 0.9) < 0.09


def test_nothing_is_said_to_fit_that_does_not(scores):
    assert [s.cell.name for s in scores if s.said_to_fit and not s.fits] == []


def test_cells_cover_chips_models_and_remat(scores):
    cells = [score.cell for score in scores]
    assert {cell.cluster.chip.name for cell in cells} == {"h100", "v5e", "v5p", "v6e"}
    assert {"llama3.2-1b", "llama3-405b", "mixtral-8x7b"} <= {cell.model for cell in cells}
    assert {"none", "dots", "full"} <= {cell.remat for cell in cells}
