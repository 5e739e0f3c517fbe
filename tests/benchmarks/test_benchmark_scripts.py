"""Every benchmark runs and ends with its figures as one line of JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def figures(script, *arguments):
    done = run(script, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def import_from_benchmarks(code):
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_step_overhead():
    sizes = ("--layers=1", "--embed=32", "--batch=8", "--length=12", "--steps=2", "--warmup=1")
    found = figures("step_overhead.py", *sizes)
    assert found["ratio_1_device"] > 0
    meshes = found["ratio_8_devices_data"], found["ratio_8_devices_fsdp"]
    assert found["ratio_8_devices"] == max(meshes)
    for mesh in ("1_device", "8_devices_data", "8_devices_fsdp"):
        # The same sums in another order, in float32.
        assert found[f"losses_apart_{mesh}"] < 1e-5, mesh


def test_init_memory():
    found = figures("init_memory.py", "--layers=1", "--embed=512", "--vocab=32768")
    # Two tables, a layer of 4 matrices of 512**2 and 3 of four times that, and three norms.
    assert found["num_params"] == 2 * 32768 * 512 + (4 + 3 * 4) * 512**2 + 3 * 512
    assert found["state_bytes"] == 4 * found["num_params"]
    for way in ("init_state", "one_device"):
        ratio = found[f"{way}_peak_bytes"] / found["state_bytes"]
        assert found[f"{way}_ratio"] == pytest.approx(ratio, abs=1e-3)
        assert ratio > 0.9, "less than the state itself cannot be"
    # At this size the compiler takes more memory than the state, so the two ways do not compare.
    peaks = [found[f"{way}_peak_bytes"] for way in ("init_state", "one_device")]
    assert found["ratio"] == pytest.approx(peaks[0] / peaks[1], abs=1e-3)


def test_import_adds_little():
    done = import_from_benchmarks("import startup; print(*startup.import_seconds())")
    assert done.returncode == 0, done.stderr
    lazy, everything = map(float, done.stdout.split())
    assert lazy < 0.3
    assert lazy < everything


def test_first_step_is_timed_by_its_line():
    done = import_from_benchmarks(
        "import startup\n"
        "code = \"import time; print('step 0'); time.sleep(0.5); print('step 1  loss 2')\"\n"
        "print(startup.seconds_to_first_step([sys.executable, '-u', '-c', code]))\n"
        "startup.seconds_to_first_step([sys.executable, '-c', 'print(7); raise SystemExit(3)'])\n"
    )
    assert done.returncode == 1
    assert 0.5 < float(done.stdout) < 60
    assert done.stderr.startswith(sys.executable)
    assert done.stderr.endswith("failed:\n7\n\n")


def test_both_first_steps(tmp_path):
    """The commands that startup.py compares both reach their first step."""
    done = import_from_benchmarks(
        "import pathlib, startup\n"
        f"ours, plain = startup.commands(pathlib.Path({str(tmp_path)!r}), 2)\n"
        f"print(startup.seconds_to_first_step([*ours, {f'run_dir={tmp_path}/run'!r}]))\n"
        "print(startup.seconds_to_first_step(plain))\n"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2


def test_rule_resolution():
    found = figures("rule_resolution.py")
    assert found["repeated_tensors_per_second"] > 100_000


def test_checkpoints():
    found = figures("checkpoints.py", "--megabytes=16", "--repeats=1", "--devices=4")
    # Eight layers of 204 rows of 1024, two bytes of parameter and eight of moments each.
    assert found["state_bytes"] == 8 * 204 * 1024 * 10
    seconds = found["state_bytes"] / found["raw_bytes_per_second"]
    saving = found["state_bytes"] / found["save_bytes_per_second"]
    assert found["save_over_raw"] == pytest.approx(seconds / saving, rel=1e-2)
    assert found["save_peak_over_state"] >= 1
    assert found["restore_peak_over_state"] > 1, "less than the state itself cannot be"


def test_wrong_numbers(tmp_path):
    # The second one has a matmul whose rows XLA permutes.
    out = tmp_path / "programs.jsonl"
    found = figures("wrong_numbers.py", "--only=4,15", "--constrain=user", f"--out={out}")["user"]
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["seed"] for record in records] == [4, 15]
    assert found["programs"] == found["right"] + found["wrong"] == 2
    assert found["wrong_seeds"] == [r["seed"] for r in records if r["status"] == "wrong"]
    assert all(record["gradient_error"] < 1e-5 for record in records if record["status"] == "right")


@pytest.mark.soak
def test_recovery():
    found = figures("recovery.py", "--repeats=1")
    assert 0 < found["stop_seconds"] < found["start_seconds"]
    assert found["hang_seconds"] > 0


def test_check_time():
    sizes = ("--layers=2", "--embed=32", "--batch=8", "--length=8", "--repeats=1")
    found = figures("check_time.py", *sizes)
    for name in ("scanned", "unrolled"):
        assert found[name]["lines"] > 100
        assert 0 < found[name]["check_seconds"] < found[name]["compile_seconds"]


def test_unannotated():
    found = figures("unannotated.py", "--models=mlp", "--meshes", "fsdp=8", "--platform=cpu")
    (row,) = found["rows"]
    assert found["largest_sent_ratio"] == row["sent_ratio"]
    # Four pairs of kernels of 1024 x 4096 float32 are gathered, and their gradients scattered. For
    # the backward pass the compiler keeps what it gathered, or gathers it again.
    kernels = 4 * 2 * 1024 * 4096 * 4 * 7 / 8
    assert 2 <= row["sent"][1] / kernels < 3.1
