"""Every benchmark runs and ends with its figures as one line of JSON."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import startup
from closed_forms import Sizes, Strategy, sent_bytes
from gpu_train import model_facts, parse, peak_flops
from plan_ranking import kendall_tau
from shardlib.cost.machine.measured import save

pytestmark = pytest.mark.docs

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HAS_TORCH = importlib.util.find_spec("torch") is not None


def output(script, *arguments, **variables):
    """Returns the lines that a benchmark prints."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def figures(script, *arguments, **variables):
    return json.loads(output(script, *arguments, **variables)[-1])


@pytest.mark.soak
def test_step_overhead():
    sizes = ("--layers=1", "--embed=32", "--batch=8", "--length=12", "--steps=2", "--warmup=1")
    found = figures("step_overhead.py", *sizes)
    assert found["ratio_1_device"] > 0
    meshes = found["ratio_8_devices_data"], found["ratio_8_devices_fsdp"]
    assert found["ratio_8_devices"] == max(meshes)
    for mesh in ("1_device", "8_devices_data", "8_devices_fsdp"):
        # The same sums in another order, in float32.
        assert found[f"losses_apart_{mesh}"] < 1e-5, mesh


@pytest.mark.soak
def test_serving():
    sizes = ("--requests=2", "--rounds=1", "--layers=1", "--embed=64", "--vocab=256")
    found = figures("serving.py", *sizes, "--without-transformers")
    assert found["tokens_per_second"] > 0
    assert 0 < found["host_share"] < 1
    assert (found["programs"], found["programs_later"]) == (6, 0)


def test_serving_accuracy():
    found = figures("serving_accuracy.py")
    for chip in ("h100", "a100-80"):
        assert found[chip]["rows"] == 22
        # As documented; none of the constants was fitted to these rows.
        assert 0.9 < found[chip]["median"] < 1.1
        assert 0.8 < found[chip]["least"] < found[chip]["most"] < 1.6


@pytest.mark.soak
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
    lazy, everything = startup.import_seconds()
    assert lazy < 0.3
    assert lazy < everything


def test_first_step_is_timed_by_its_line(capsys):
    code = "import time; print('step 0'); time.sleep(0.5); print('step 1  loss 2')"
    assert 0.5 < startup.seconds_to_first_step([sys.executable, "-u", "-c", code]) < 60
    with pytest.raises(SystemExit, match=r"failed:\n7\n"):
        startup.seconds_to_first_step([sys.executable, "-c", "print(7); raise SystemExit(3)"])


@pytest.mark.soak
def test_both_first_steps(tmp_path):
    """The commands that startup.py compares both reach their first step."""
    ours, plain = startup.commands(tmp_path, 2)
    assert startup.seconds_to_first_step([*ours, f"run_dir={tmp_path}/run"]) > 0
    assert startup.seconds_to_first_step(plain) > 0


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


@pytest.mark.soak
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
    found = figures("unannotated.py", "--models=mlp", "--meshes", "fsdp=8", "--on=cpu:8")
    (row,) = found["rows"]
    assert found["largest_sent_ratio"] == row["sent_ratio"]
    # Four pairs of kernels of 1024 x 4096 float32 are gathered, and their gradients scattered. For
    # the backward pass the compiler keeps what it gathered, or gathers it again.
    kernels = 4 * 2 * 1024 * 4096 * 4 * 7 / 8
    assert 2 <= row["sent"][1] / kernels < 3.1


def test_find_rules():
    found = figures("find_rules.py", "--tiny", "--models=graph", "--meshes", "fsdp=8", "--on=cpu:8")
    (row,) = found["rows"]
    # All parameters are small and whole: their gradients are summed.
    assert row["ratios"]["fsdp"]["sent"] == row["ratios"]["fsdp8"]["sent"]
    assert row["found"]["sent"] == sum(row["found"]["by_axes"].values()) > 0
    assert row["predicted"]["peak"] > 0


def test_found_rules_under_xla():
    words = "--tiny", "--models=lstm", "--meshes", "fsdp=8", "--on=cpu:8", "--partitioners"
    found = figures("find_rules.py", *words)
    (row,) = found["rows"]
    for by in ("user", "constrained"):
        assert row["ratios"][by].keys() == {"sent", "peak", "trace", "compile"}
    assert found["largest_trace_to_user"] == row["ratios"]["user"]["trace"] > 0


@pytest.mark.soak
def test_compile_time():
    sizes = ("--embed=32", "--batch=8", "--length=8", "--mesh=data=-1", "--repeats=1")
    cases = ("--layers", "2", "6", "--devices", "2", "4")
    found = figures("compile_time.py", *cases, *sizes)
    small = found["2_layers_2_devices_total_seconds"]
    for case in ("2_layers_2_devices", "6_layers_2_devices", "2_layers_4_devices"):
        parts = [found[f"{case}_{part}_seconds"] for part in ("trace", "lower", "compile")]
        assert all(part > 0 for part in parts)
        # One compilation was timed, so that its median is itself.
        assert found[f"{case}_total_seconds"] == pytest.approx(sum(parts), abs=1e-3)
    ratios = found["layers_ratio"], found["devices_ratio"]
    totals = found["6_layers_2_devices_total_seconds"], found["2_layers_4_devices_total_seconds"]
    assert ratios == pytest.approx([total / small for total in totals], abs=2e-3)


def test_context_memory():
    """A sequence that grows with the devices along `context` takes no more memory on each."""
    sizes = ("--length=1024", "--layers=1", "--embed=128", "--heads=4", "--vocab=64")
    found = figures("context_memory.py", *sizes, "--kv-heads=2", "--backend=blockwise")
    short, long = found["bytes_1_device"], found["bytes_8_devices"]
    assert found["ratio"] == pytest.approx(long / short, abs=1e-3)
    assert found["ratio"] <= 1.10
    # The scores of 4 heads in float32, at least once.
    assert found["bytes_1_device_xla"] - short > 4 * 1024**2
    assert found["work_zigzag"] == 1
    # Contiguous, the last of 8 devices computes 31 of the 136 visible tiles: of its 8 squares of
    # four tiles it leaves out one above the diagonal.
    assert found["work_contiguous"] == pytest.approx(31 * 8 / 136, abs=1e-4)


def test_plan_gpu_runs_dry():
    found = figures("plan_gpu.py", "--dry-run")
    assert found["device"] == "cpu"
    assert found["predicted_seconds"] is None
    assert found["calibrated_seconds"] > 0
    assert found["measured_seconds"] > 0
    # 2 layers of 2*64*16*(4+2) + 3*64*96, two tables of 256*64: 12 bytes each for the state, and 4
    # for the gradient.
    params = 2 * (2 * 64 * 16 * 6 + 3 * 64 * 96) + 2 * 256 * 64
    assert found["predicted_bytes"] > 16 * params


def test_plans_hold():
    found = figures("plan_holds.py", "--only", "llama3.2-3b v5e-8")
    assert found["questions"] == 1
    assert found["proposals"] == 4
    assert found["out_of_memory"] == []


def test_kendalls_tau():
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert kendall_tau([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 1], [1, 2]) == 0


def test_plan_ranking_on_two_meshes_of_a_tiny_model(tmp_path):
    sys.path.insert(0, str(BENCHMARKS.parent / "tests" / "plan"))
    from test_plan_measured import calibration

    save(calibration(), tmp_path / "c.json")
    tiny = ("model.num_layers=4", "model.embed_dim=32", "model.mlp_dim=64")
    lines = output(
        "plan_ranking.py",
        *(f"--calibration={tmp_path / 'c.json'}", "--meshes=2", "--rounds=3", "--warmup=1"),
        *(*tiny, "data.sequence_length=16"),
        SHARDLIB_CACHE=str(tmp_path),
    )
    found = json.loads(lines[-1])
    assert set(found["measured_seconds"]) == set(found["predicted_seconds"]) == {"data=8", "fsdp=8"}
    assert all(seconds > 0 for seconds in found["measured_seconds"].values())
    assert found["kendall_tau"] in (-1.0, 0.0, 1.0)
    assert "calibrated: 8 devices on 2 cores" in "\n".join(lines)


# Of a layer: 2 * 4 * 1 * (2 + 1) = 24 in attention, 3 * 4 * 8 = 96 in the MLP; 40 in each table.
SMALL = {"layers": 2, "embed": 4, "heads": 2, "kv_heads": 1, "head_dim": 1, "mlp": 8, "vocab": 10}
SMALL |= {"batch": 8, "length": 16}
LAYERS, TABLES, TOKENS = 2 * (24 + 96), 2 * 40, 8 * 16


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"mesh": {"data": 4}}, {"data": 2 * 3 / 4 * (LAYERS + TABLES) * 4}),
        ({"mesh": {"fsdp": 4}}, {"fsdp": 3 / 4 * (3 * LAYERS + 2 * TABLES) * 4}),
        ({"mesh": {"fsdp": 4}, "zero": 2}, {"fsdp": 3 / 4 * 2 * (LAYERS + TABLES) * 4}),
        (
            {"mesh": {"data": 2, "fsdp": 4}},
            {
                "data": 2 * 1 / 2 * (LAYERS + TABLES) / 4 * 4,
                "fsdp": 3 / 4 * (3 * LAYERS + 2 * TABLES) * 4,
            },
        ),
        # Four all-reduces a layer, and two, of [tokens, embed].
        ({"mesh": {"tensor": 2}}, {"tensor": 10 * 2 * 1 / 2 * TOKENS * 4 * 4}),
        (
            {"mesh": {"context": 4}},
            {
                # Three hops of [tokens / 4, kv_heads * head_dim]: K, V, again, and their gradients.
                "context": 2 * 3 * 6 * TOKENS / 4 * 4 + 2 * 3 / 4 * (LAYERS + TABLES) * 4
            },
        ),
        (
            {"mesh": {"context": 4}, "shared": "ulysses"},
            {
                # Query, key, value and output, forward and backward.
                "context": 2 * 2 * 3 / 4 * TOKENS / 4 * 6 * 4 + 2 * 3 / 4 * (LAYERS + TABLES) * 4
            },
        ),
        (
            {"mesh": {"stage": 2}, "microbatches": 4},
            {"stage": 2 * TOKENS * 4 * 4 + 2 * 1 / 2 * TABLES * 4},
        ),
    ],
    ids=str,
)
def test_closed_forms(strategy, expected):
    found = sent_bytes(Sizes(**SMALL), Strategy(**strategy))
    assert found == pytest.approx(expected)


def test_experts_send_copies_of_tokens_four_times():
    sizes = Sizes(**SMALL, experts=4, experts_per_token=2)
    found = sent_bytes(sizes, Strategy({"expert": 4}))
    exchanged = 2 * 4 * 3 / 4 * TOKENS / 4 * 2 * 4 * 4
    replicated = 2 * 3 / 4 * (2 * 24 + TABLES) * 4
    assert found == pytest.approx({"expert": exchanged + replicated})


def test_programs_for_the_cpu_send_what_the_forms_say():
    # Large enough that what travels is no small collective.
    sizes = {"layers": 2, "embed": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "mlp": 1024}
    sizes |= {"vocab": 1024, "batch": 16, "length": 64}
    words = ("--on=cpu:8", "--rows=fsdp,tensor_sequence")
    rows = figures("collectives.py", *words, *(f"--size={k}={v}" for k, v in sizes.items()))["rows"]
    assert [row["row"] for row in rows] == ["fsdp", "tensor_sequence"]
    for row in rows:
        # Gradients of the scales of norms go with those of matrices.
        assert row["folded_ratio"] == pytest.approx(1.0, abs=2e-3), row
        assert row["sent"] > row["folded"], "XLA for CPU makes no reduce-scatter"
        assert row["trips_known"]
    assert "all-reduces of which a part is read" in rows[0]["why"]


@pytest.fixture(scope="module")
def dry_run():
    """The lines of a benchmark for GPUs that does on the CPU what it does on a GPU."""
    return output("gpu_train.py", "--dry-run")


@pytest.mark.soak
def test_dry_run_has_a_row_for_each_contender(dry_run):
    figures = json.loads(dry_run[-1])
    rows = figures["rows"]
    in_jax = ["shardlib", "plain_jax", "shardlib_fp8"]
    assert list(rows) == [*in_jax, "torch_math" if HAS_TORCH else "torch"]
    for name in (*in_jax, *(["torch_math"] if HAS_TORCH else [])):
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


def test_the_default_model_and_its_flops():
    # 24 layers of 2*1536*128*(12+4) + 3*1536*4096 weights and a head of 1536*32768 take 6 FLOPs
    # a token each; causal attention takes 12 for each of 4096**2/2 pairs, 12 heads and 128 dims.
    num_params, flops = model_facts(parse([]))
    weights = 24 * (2 * 1536 * 128 * 16 + 3 * 1536 * 4096) + 1536 * 32768
    assert num_params == weights + 24 * 2 * 1536 + 1536 * 32768 + 1536
    attended = 12 * 4096**2 / 2 * 12 * 128 * 24
    assert flops == 4 * (6 * weights * 4096 + attended)
    assert (peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")) == (989.5e12, None)
