"""A run from its first line to its closing card, and what it leaves in its directory."""

import json
import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from shardlib import run
from shardlib.checkpoint import SavedCheckpoints
from shardlib.checkpoint.tree import flatten
from shardlib.config import load
from shardlib.data import read_tokenizer
from shardlib.log.events import read_events
from shardlib.mesh import MeshConfig
from shardlib.run.setup import make_scope, open_source, setup
from shardlib.runtime.exit_codes import HUNG
from shardlib.runtime.launch.progress import PROGRESS_VARIABLE, Progress, read_progress
from shardlib.runtime.phases import PhaseClock

KEYS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "mfu",
]
NAMES = ("accuracy", "bits_per_byte", "loss", "nll_nats")


def test_a_run_leaves_config_tokenizer_metrics_and_checkpoints(finished, lab):
    names = {path.name for path in finished.run_dir.iterdir()}
    files = {"run_id", "config.yaml", "tokenizer.json", "metrics.jsonl", "events.jsonl"}
    assert names == files | {"checkpoints"}
    steps = sorted(path.name for path in (finished.run_dir / "checkpoints").iterdir())
    assert steps == ["00000010", "00000020"]
    saved = load(run.RunConfig, finished.run_dir / "config.yaml")
    assert saved == lab.config(finished.run_dir)
    assert read_tokenizer(finished.run_dir / "tokenizer.json").decode([104, 105]) == "hi"
    assert finished.result.step == int(finished.result.state.step) == 20


def test_every_step_has_one_line_with_the_same_keys(finished, rows):
    lines = rows(finished.run_dir)
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        assert list(line)[:8] == KEYS
        assert line["mfu"] is None  # The peak of a CPU is not known.
        assert line["step_seconds"] > 0
        assert line["data_wait_seconds"] >= 0
    assert lines[0]["tokens_per_second"] is None  # It has compiled.
    assert all(line["tokens_per_second"] > 0 for line in lines[1:])
    assert lines[1]["learning_rate"] == pytest.approx(2 / 3 * 1e-2)
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]


def test_an_evaluation_is_in_the_line_of_its_step(finished, rows):
    lines = rows(finished.run_dir)
    with_eval = [line["step"] for line in lines if any(k.startswith("eval/") for k in line)]
    assert with_eval == [10, 20]
    assert {name: lines[-1][f"eval/{name}"] for name in NAMES} == finished.result.evaluation
    # 8.05 bits is what 257 equally likely tokens take.
    assert 1 < lines[-1]["eval/bits_per_byte"] < lines[9]["eval/bits_per_byte"] < 8.05


def test_what_a_person_sees_of_a_run(finished):
    out, run_dir = finished.out, finished.run_dir
    for text in (
        "fsdp=8 over 8 cpu devices",
        "37.5K parameters, 18.9 KiB per device",
        "\nstep 10/20  loss ",
        "\neval at step 10  accuracy ",
        "─ sample at step 20 ─",
        "─ finished at step 20 ─",
    ):
        assert text in out
    assert f"  train on  shardlib train {run_dir}/config.yaml train.steps=40\n" in out
    assert out.endswith(f"  explain   shardlib explain {run_dir}/config.yaml\n")
    assert len([line for line in out.splitlines() if line.startswith("step")]) == 3


def test_a_finished_run_says_so_and_changes_nothing(finished, lab, tmp_path, capsys):
    run_dir = finished.copy(tmp_path / "run")
    before = {p: p.stat().st_mtime_ns for p in sorted(run_dir.rglob("*"))}
    result = run.train(lab.config(run_dir))
    assert (result.step, result.evaluation) == (20, {})
    out = capsys.readouterr().out
    assert "\nalready trained to step 20; give a larger train.steps to go on\n" in out
    assert "resumes" not in out
    assert {p: p.stat().st_mtime_ns for p in sorted(run_dir.rglob("*"))} == before


@pytest.mark.mesh
def test_more_steps_go_on_and_the_config_says_so(finished, lab, tmp_path, rows, capsys):
    run_dir = finished.copy(tmp_path / "run")
    config = lab.config(run_dir, "train.steps=23", "eval.every_steps=0", "train.sample_length=0")
    assert run.train(config).step == 23
    lines = rows(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 24))
    assert lines[:20] == rows(finished.run_dir)
    assert load(run.RunConfig, run_dir / "config.yaml") == config
    out = capsys.readouterr().out
    assert "resumes    from step 20" in out
    assert "sample at" not in out
    assert "shardlib generate" not in out
    saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert saved == ["00000010", "00000020", "00000023"]


@pytest.mark.mesh
def test_images_are_counted_and_need_no_tokenizer(lab, tmp_path, rows, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("PIL")
    config = tmp_path / "digits.yaml"
    config.write_text(
        f"run_dir: {tmp_path / 'run'}\n"
        "model: {name: resnet, depth: 18, stem: small, width: 8}\n"
        "data: {kind: images}\n"
        f"train: {{steps: 2, global_batch: 16, compilation_cache: {lab.root / 'compiled'}}}\n"
        "mesh: data=8\n"
        "eval: {every_steps: 0}\n"
        "checkpoint: {enabled: false}\n"
    )
    run.train(load(run.RunConfig, config))
    assert [list(line)[4] for line in rows(tmp_path / "run")] == ["images_per_second"] * 2
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"run_id", "config.yaml", "metrics.jsonl", "events.jsonl"}
    out = capsys.readouterr().out
    assert "16 images" in out
    # Nothing was saved, so there is nothing to go on from.
    assert out.endswith(f"\n  explain  shardlib explain {tmp_path}/run/config.yaml\n")


@pytest.mark.mesh
def test_what_is_asked_after_each_step_stops_a_run(lab, finished, tmp_path, losses, capsys):
    asked = []

    def ask(step):
        asked.append(step)
        return "its owner" if step == 3 else None

    clock = PhaseClock()
    result = run.train(lab.config(tmp_path / "run"), clock=clock, after_step=ask)
    assert (result.step, asked) == (3, [1, 2, 3])
    assert "─ stopped by its owner and saved at step 3 ─" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(finished.run_dir)[:3]
    assert read_events(tmp_path / "run")[-1]["facts"] == {
        "how": "stopped by its owner and saved at step 3"
    }
    # In which it waits for deletions and for the other processes.
    assert clock.present[0] == "save"


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2", "data=1", "fsdp=2,tensor=4"])
def test_what_is_restored_elsewhere_is_what_was_in_memory(mesh, finished, lab):
    config = lab.config(finished.run_dir, f"mesh={mesh}")
    num_devices = math.prod(MeshConfig.parse(mesh).sizes.values())
    scope = make_scope(config, jax.devices()[:num_devices])
    parts = setup(config, open_source(config, "train").spec, scope)
    restored = SavedCheckpoints(finished.run_dir / "checkpoints").restore(20, parts.saved_state())
    assert restored.params["head"]["kernel"].sharding.mesh == scope.mesh
    kept, found = (
        {path: np.asarray(jax.random.key_data(x) if path == "rng" else x) for path, x in leaves}
        for leaves in (flatten(finished.result.state).items(), flatten(restored).items())
    )
    assert kept.keys() == found.keys()
    for path, leaf in kept.items():
        assert leaf.tobytes() == found[path].tobytes(), path


LIMITED = """
import resource, signal, sys
# A file system that is full: from here on no file may grow over 20 kB.
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from shardlib.cli import main
main(sys.argv[1:])
"""


def train_on_a_full_disk(lab, run_dir, *words, **variables):
    words = ("train", lab.config_file, f"run_dir={run_dir}", "eval.every_steps=0", *words)
    # JAX would leave the half of a program where others look for it.
    words += ("train.compilation_cache=null",)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, words)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    return done


@pytest.mark.mesh
def test_only_the_last_save_that_fails_ends_the_run(lab, finished, tmp_path):
    done = train_on_a_full_disk(lab, tmp_path / "run")
    said = done.stderr.splitlines()
    at = next((i for i, x in enumerate(said) if x.startswith("SaveFailedError: ")), None)
    assert at is not None, done.stderr
    place = f"{tmp_path}/run/checkpoints"
    failed = "the checkpoint of step {} could not be written to " + f"{place}: "
    assert said[at].startswith("SaveFailedError: " + failed.format(20))
    assert said[at + 1] == "  Free space or restore access there; complete steps: none."
    # The first was told of, and training went on.
    told = [line for line in done.stdout.splitlines() if line.startswith(failed.format(10))]
    assert len(told) == 1
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == list(range(1, 21))
    events = read_events(tmp_path / "run")
    assert [event["kind"] for event in events] == ["start", "checkpoint", "checkpoint", "end"]
    facts = events[-1]["facts"]
    assert facts["error"] == "SaveFailedError"
    assert facts["message"].startswith(failed.format(20))


@pytest.mark.mesh
def test_saves_that_fail_too_often_end_the_run_before_the_next(lab, finished, tmp_path, rows):
    words = ("checkpoint.max_failures=1", "checkpoint.asynchronous=false", "train.sample_length=0")
    progress = tmp_path / "progress"
    variables = {PROGRESS_VARIABLE: str(progress)}
    done = train_on_a_full_disk(lab, tmp_path / "run", *words, **variables)
    # There may be room the next time: nothing that is bound to happen again.
    assert read_progress(progress) == Progress()
    *_, first, last = done.stderr.splitlines()
    assert first == (
        "SaveFailedError: a checkpoint could not be written to "
        f"{tmp_path}/run/checkpoints; the last good step is none."
    )
    assert last == "  Free space or restore access there, then start again."
    assert rows(tmp_path / "run")[-1]["step"] == 11


@pytest.mark.mesh
def test_a_run_that_hangs_is_ended_and_says_so(lab, tmp_path):
    run_dir = tmp_path / "run"
    words = (f"run_dir={run_dir}", "watchdog.compile=0.3", "train.compilation_cache=null")
    done = lab.shardlib("train", lab.config_file, *words)
    assert done.returncode == HUNG
    assert "no progress in phase 'compile'" in done.stderr
    *_, last = read_events(run_dir)
    assert (last["kind"], last["facts"]) == ("hung", {"phase": "compile"})
    assert last["spent"]["compile"] >= 0.3


@pytest.mark.mesh
def test_a_run_without_a_writable_home_goes_on_and_says_so_once(
    lab, tmp_path, rows, monkeypatch, caplog
):
    (tmp_path / "file").write_text("in the way")
    for name in ("SHARDLIB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    run.train(lab.config(tmp_path / "run", "train.steps=3", "eval.every_steps=0"))
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "home/.cache/shardlib cannot be written: the cache is " in record.getMessage()


def test_names_stay_callable_whatever_is_imported_first():
    from shardlib.run import training

    assert run.train is training.train
    assert {"train", "explain", "generate", "TrainResult"} <= set(dir(run))
