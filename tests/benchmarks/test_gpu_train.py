"""The GPU benchmark is complete: its dry run does on the CPU what it does on a GPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HAS_TORCH = importlib.util.find_spec("torch") is not None


def run(*arguments):
    command = [sys.executable, str(BENCHMARKS / "gpu_train.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def dry_run():
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_dry_run_has_a_row_for_each_contender(dry_run):
    figures = json.loads(dry_run[-1])
    rows = figures["rows"]
    assert list(rows) == ["shardlib", "plain_jax", "torch_math" if HAS_TORCH else "torch"]
    for name in ("shardlib", "plain_jax", *(["torch_math"] if HAS_TORCH else [])):
        row = rows[name]
        assert row["tokens_per_second"] == pytest.approx(2 * 32 / row["step_seconds"])
        # A model that knows nothing gives each of 256 tokens the same chance.
        assert row["first_loss"] == pytest.approx(5.545, abs=0.1), name
        assert row["last_loss"] < row["first_loss"], name
        assert row["remat"] == "none"
    speeds = [rows[name]["tokens_per_second"] for name in ("shardlib", "plain_jax")]
    assert figures["ratio_plain_jax"] == pytest.approx(speeds[0] / speeds[1], rel=1e-3)
    assert "causal" in figures["mfu_convention"]
    # 2 layers of 2*64*16*(4+2) + 3*64*96 + 2*64, two tables of 256*64, and the last norm.
    assert figures["num_params"] == 2 * (12288 + 18432 + 128) + 2 * 256 * 64 + 64


def test_dry_run_prints_the_table(dry_run):
    (head,) = [line for line in dry_run if line.lstrip().startswith("tokens/s")]
    assert "MFU" in head
    assert "peak GiB" in head
    assert head.rstrip().endswith("attention  remat  XLA flags")
    assert any(line.startswith("MFU: causal attention") for line in dry_run)
    if not HAS_TORCH:
        assert any(line.startswith("torch  absent: PyTorch is not installed") for line in dry_run)


def test_the_default_model_and_its_flops():
    # 24 layers of 2*1536*128*(12+4) + 3*1536*4096 weights and a head of 1536*32768 take 6 FLOPs
    # a token each; causal attention takes 12 for each of 4096**2/2 pairs, 12 heads and 128 dims.
    script = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import gpu_train\n"
        "print(*gpu_train.model_facts(gpu_train.parse([])))\n"
        "print(gpu_train.peak_flops('NVIDIA H100 80GB HBM3'), gpu_train.peak_flops('cpu'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    num_params, flops, peak, unknown = done.stdout.split()
    weights = 24 * (2 * 1536 * 128 * 16 + 3 * 1536 * 4096) + 1536 * 32768
    assert int(num_params) == weights + 24 * 2 * 1536 + 1536 * 32768 + 1536
    attended = 12 * 4096**2 / 2 * 12 * 128 * 24
    assert float(flops) == 4 * (6 * weights * 4096 + attended)
    assert (float(peak), unknown) == (989.5e12, "None")
