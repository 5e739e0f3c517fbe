"""The benchmarks of the planner run, and their figures are what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def figures(script, *arguments, env=None):
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_plan_gpu_runs_dry():
    _, found = figures("plan_gpu.py", "--dry-run")
    assert found["device"] == "cpu"
    assert found["predicted_seconds"] is None
    assert found["calibrated_seconds"] > 0
    assert found["measured_seconds"] > 0
    # 2 layers of 2*64*16*(4+2) + 3*64*96, two tables of 256*64: 12 bytes each for the state, and 4
    # for the gradient.
    params = 2 * (2 * 64 * 16 * 6 + 3 * 64 * 96) + 2 * 256 * 64
    assert found["predicted_bytes"] > 16 * params


def test_kendalls_tau():
    script = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "from plan_ranking import kendall_tau\n"
        "print(kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]), kendall_tau([1, 2, 3], [3, 2, 1]),\n"
        "      kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]), kendall_tau([1, 1], [1, 2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [float(x) for x in done.stdout.split()] == pytest.approx([1.0, -1.0, 4 / 6, 0.0])


def test_plan_ranking_on_two_meshes_of_a_tiny_model(tmp_path):
    sys.path.insert(0, str(BENCHMARKS.parent / "tests" / "plan"))
    from test_plan_measured import calibration

    from shardlib.cost.machine.measured import save

    save(calibration(), tmp_path / "c.json")
    tiny = (
        "model.num_layers=4",
        "model.embed_dim=32",
        "model.mlp_dim=64",
        "data.sequence_length=16",
    )
    text, found = figures(
        "plan_ranking.py",
        f"--calibration={tmp_path / 'c.json'}",
        "--meshes=2",
        "--rounds=3",
        "--warmup=1",
        *tiny,
        env={"SHARDLIB_CACHE": str(tmp_path)},
    )
    assert set(found["measured_seconds"]) == set(found["predicted_seconds"]) == {"data=8", "fsdp=8"}
    assert all(seconds > 0 for seconds in found["measured_seconds"].values())
    assert found["kendall_tau"] in (-1.0, 0.0, 1.0)
    assert "calibrated: 8 devices on 2 cores" in text
