"""The benchmark of the cost model reads any file and ends with its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardlib.cost.machine.constants import fit_errors

pytestmark = pytest.mark.docs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_accuracy.py"
DATA = SCRIPT.parent / "data" / "published_runs.json"


def run(*arguments):
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def test_given_runs():
    lines = run("--no-cv").splitlines()
    figures = json.loads(lines[-1])
    fitted = fit_errors()
    assert figures["rows"] == fitted["cases"]
    assert figures["median_error"] == fitted["median_error"] < 0.03
    assert figures["p90_error"] == fitted["p90_error"] < 0.09
    # Cross-validation takes a minute: `--fit` stores it.
    assert fitted["cv_median_error"] < 0.12
    assert fitted["cv_p90_error"] < 0.30
    text = "\n".join(lines)
    assert "tpu_recipes_ironwood-016" in text
    assert "levanter_v3-002                  it gives no dims, and none are known for" in text
    assert "8-bit rows, apart" in text


def test_another_file(tmp_path):
    rows = json.loads(DATA.read_text())["rows"]
    some = [row for row in rows if row["family"] in ("tpu_recipes_ironwood", "alpa")]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([*some, {"id": "odd", "hardware": "abacus"}]))
    lines = run("--no-cv", "--runs", str(path)).splitlines()
    figures = json.loads(lines[-1])
    assert figures["rows"] == 4
    assert figures["cv_median_error"] is None
    assert any("'abacus', is not a chip of hardware.chips" in line for line in lines)
    path.write_text("[]")
    assert json.loads(run("--runs", str(path)).splitlines()[-1])["rows"] == 0
