"""The benchmark of compile times compiles what it says, and divides what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_time.py"


def test_ratios_are_those_of_the_totals():
    sizes = ("--embed=32", "--batch=8", "--length=8", "--mesh=data=-1", "--repeats=1")
    cases = ("--layers", "2", "6", "--devices", "2", "4")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *cases, *sizes], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    small = found["2_layers_2_devices_total_seconds"]
    for case in ("2_layers_2_devices", "6_layers_2_devices", "2_layers_4_devices"):
        parts = [found[f"{case}_{part}_seconds"] for part in ("trace", "lower", "compile")]
        assert all(part > 0 for part in parts)
        # One compilation was timed, so that its median is itself.
        assert found[f"{case}_total_seconds"] == pytest.approx(sum(parts), abs=1e-3)
    ratios = found["layers_ratio"], found["devices_ratio"]
    totals = found["6_layers_2_devices_total_seconds"], found["2_layers_4_devices_total_seconds"]
    assert ratios == pytest.approx([total / small for total in totals], abs=2e-3)
