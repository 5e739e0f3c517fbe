"""A sequence that grows with the devices along `context` takes no more memory on each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "context_memory.py"


def test_context_memory():
    sizes = ("--length=1024", "--layers=1", "--embed=128", "--heads=4", "--vocab=64")
    command = [sys.executable, str(SCRIPT), *sizes, "--kv-heads=2", "--backend=blockwise"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    short, long = found["bytes_1_device"], found["bytes_8_devices"]
    assert found["ratio"] == pytest.approx(long / short, abs=1e-3)
    assert found["ratio"] <= 1.10
    # The scores of 4 heads in float32, at least once.
    assert found["bytes_1_device_xla"] - short > 4 * 1024**2
    assert found["work_zigzag"] == 1
    # Contiguous, the last of 8 devices computes 31 of the 136 visible tiles: of its 8 squares of
    # four tiles it leaves out one above the diagonal.
    assert found["work_contiguous"] == pytest.approx(31 * 8 / 136, abs=1e-4)
