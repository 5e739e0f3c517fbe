"""Runs that stop and go on: at a signal, on another mesh, on other devices, with another config."""

import dataclasses
import datetime
import os
import signal
import subprocess
import time

import numpy as np
import pytest

from shardlib import run
from shardlib.checkpoint import RunCheckpoints
from shardlib.cli import main
from shardlib.config import from_dict
from shardlib.errors import CheckpointError, ConfigError, DataError
from shardlib.log.events import read_events
from shardlib.run.config import RunConfig, check_resumable

QUIET = ("eval.every_steps=0", "train.sample_length=0")
# Sums in another order differ by float32 rounding, which ten steps of training carry on.
RELATIVE = 1e-5


def wait_for_step(run_dir, step, process, seconds=100):
    deadline = time.monotonic() + seconds
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            return
        assert process.poll() is None, "\n".join(process.communicate())
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def test_another_model_is_named_without_the_keys_that_only_one_has():
    text = from_dict(RunConfig, {"model": {"name": "transformer"}}, "text.yaml")
    images = {"model": {"name": "resnet"}, "data": {"kind": "images"}}
    with pytest.raises(ConfigError) as caught:
        check_resumable(text, from_dict(RunConfig, images, "images.yaml"))
    assert "\n  model.name: 'transformer' in the run, 'resnet' now\n" in str(caught.value)
    assert "num_heads" not in str(caught.value)


@pytest.mark.mesh
def test_the_same_mesh_goes_on_bit_for_bit(finished, lab, tmp_path, losses, capsys):
    run_dir = finished.copy(tmp_path / "run", at=10)
    run.train(lab.config(run_dir, *QUIET))
    assert losses(run_dir) == losses(finished.run_dir)
    assert "resumes    from step 10" in capsys.readouterr().out


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_bit_for_bit(
    number, lab, finished, tmp_path, losses, long_run
):
    run_dir = tmp_path / "run"
    words = ("train", lab.config_file, f"run_dir={run_dir}", "train.steps=200", *QUIET)
    process = subprocess.Popen(
        lab.command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_for_step(run_dir, 5, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
    assert err == f"\n{number.name}: stopping after this step{again}.\n"
    stopped = losses(run_dir)
    assert 5 <= len(stopped) < 200
    assert f"─ stopped by {number.name} and saved at step {len(stopped)} ─" in out
    assert out.endswith(
        f"  resume   shardlib train {run_dir}/config.yaml\n"
        f"  explain  shardlib explain {run_dir}/config.yaml\n"
    )
    with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.latest() == len(stopped)
    run.train(lab.config(run_dir, "train.steps=200", *QUIET))
    assert losses(run_dir) == losses(long_run)


@pytest.mark.mesh
def test_the_account_of_a_stopped_run_adds_up_to_its_wall_time(lab, finished, tmp_path):
    run_dir = tmp_path / "run"
    start = time.time()
    for steps in (1000, 60):
        words = ("train", lab.config_file, f"run_dir={run_dir}", f"train.steps={steps}", *QUIET)
        process = subprocess.Popen(lab.command(*words), stdout=subprocess.PIPE)
        if steps == 1000:
            wait_for_step(run_dir, 2, process)
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
        time.sleep(1)  # Idle, between the two.
    last = read_events(run_dir)[-1]
    wall = datetime.datetime.fromisoformat(last["time"]).timestamp() - start
    assert last["kind"] == "end"
    assert sum(last["spent"].values()) == pytest.approx(wall, rel=0.01)
    assert last["spent"]["idle"] > 1


@pytest.fixture(scope="session")
def long_run(lab, finished):
    run_dir = lab.root / "long"
    run.train(lab.config(run_dir, "train.steps=200", *QUIET))
    return run_dir


@pytest.mark.mesh
def test_another_mesh_goes_on(finished, lab, tmp_path, losses):
    run_dir = finished.copy(tmp_path / "run", at=10)
    run.train(lab.config(run_dir, "mesh=data=2,tensor=2,fsdp=2", *QUIET))
    expected = losses(finished.run_dir)
    assert losses(run_dir)[:10] == expected[:10]
    np.testing.assert_allclose(losses(run_dir), expected, rtol=RELATIVE)


@pytest.mark.mesh
def test_a_run_goes_on_where_it_was_moved_to(finished, tmp_path, losses, monkeypatch):
    finished.copy(tmp_path / "run", at=10)
    before = sorted(finished.run_dir.rglob("*"))
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    # By its directory, and by the config in it, as the closing card says.
    for config, steps in (("run", 12), ("run/config.yaml", 14)):
        with pytest.raises(SystemExit) as ended:
            main(["train", config, f"train.steps={steps}", *QUIET])
        assert not ended.value.code
        assert len(losses(tmp_path / "run")) == steps
    assert sorted(finished.run_dir.rglob("*")) == before
    assert losses(tmp_path / "run") == losses(finished.run_dir)[:14]
    assert run.generate("run")


@pytest.mark.mesh
def test_a_copy_that_does_not_say_who_it_is_does_not_train_the_original(
    finished, tmp_path, losses, capsys
):
    run_dir = finished.copy(tmp_path / "run", at=10)
    (run_dir / "run_id").unlink()
    before = sorted(finished.run_dir.rglob("*"))
    for config in (run_dir, run_dir / "config.yaml"):
        with pytest.raises(SystemExit) as ended:
            main(["train", str(config), "train.steps=30", *QUIET])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"ConfigError: {run_dir}/config.yaml gives run_dir {finished.run_dir}, " in said
        assert f"\n  Add run_dir={run_dir} to train this run, or run_dir=" in said
    with pytest.raises(SystemExit) as ended:
        main(["train", str(run_dir), f"run_dir={run_dir}", "train.steps=12", *QUIET])
    assert not ended.value.code
    assert losses(run_dir) == losses(finished.run_dir)[:12]
    assert sorted(finished.run_dir.rglob("*")) == before


@pytest.mark.mesh
def test_fewer_devices_go_on(finished, lab, tmp_path, losses):
    run_dir = finished.copy(tmp_path / "run", at=10)
    words = ("train", lab.config_file, f"run_dir={run_dir}", "mesh=auto", "train.cpu_devices=2")
    done = lab.shardlib(*words, *QUIET)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fsdp=2 over 2 cpu devices" in done.stdout
    np.testing.assert_allclose(losses(run_dir), losses(finished.run_dir), rtol=RELATIVE)


def test_a_directory_of_another_config_is_refused_by_key(finished, lab, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    changed = lab.config(run_dir, "seed=1", "model.num_layers=3", "train.steps=30", "mesh=data=8")
    fault = r"\n  seed: 0 in the run, 1 now\n  model.num_layers: 2 in the run, 3 now\n  Set run_dir"
    with pytest.raises(ConfigError, match=fault) as refused:
        run.train(changed)
    assert str(refused.value).endswith(f"old values, as `shardlib train {run_dir}` does.")
    # The checkpoint tells as well, where the config is gone.
    (run_dir / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"model\.num_layers: 2 in the run, 3 now"):
        run.train(changed)


def test_a_checkpoint_of_another_model_is_refused_by_leaf(finished, lab, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    state = finished.result.state
    params = {**state.params, "head": {"weight": state.params["head"]["kernel"]}}
    other = dataclasses.replace(state, params=params)
    with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
        checkpoints.save(21, other, checkpoints.metadata(20))
    before = sorted(run_dir.rglob("*"))
    fault = r"(?s)00000021 is of another model.*params/head/kernel: expected float.*\n  Restore"
    with pytest.raises(CheckpointError, match=fault):
        run.train(lab.config(run_dir, "train.steps=30"))
    assert sorted(run_dir.rglob("*")) == before


def test_data_that_has_changed_is_refused(finished, lab, tmp_path):
    run_dir = finished.copy(tmp_path / "run")
    text = lab.root / "text" / "more.txt"
    text.write_text("one more document\n")
    try:
        with pytest.raises(DataError, match=r"the data of .* has changed.*\n  Restore the files"):
            run.train(lab.config(run_dir, "train.steps=30"))
    finally:
        text.unlink()
    assert os.listdir(run_dir / "checkpoints") == os.listdir(finished.run_dir / "checkpoints")


@pytest.mark.mesh
def test_a_directory_without_a_checkpoint_starts_anew(finished, lab, tmp_path, rows, capsys):
    run_dir = finished.copy(tmp_path / "run", at=10)
    # Without its events nothing says that it had some.
    for name in ("checkpoints", "events.jsonl"):
        os.rename(run_dir / name, tmp_path / name)
    run.train(lab.config(run_dir, *QUIET, "checkpoint.enabled=false"))
    assert f"{run_dir} has no checkpoint yet: training from the start" in capsys.readouterr().out
    found = [(line["step"], line["loss"]) for line in rows(run_dir)]
    assert found == [(line["step"], line["loss"]) for line in rows(finished.run_dir)]


@pytest.mark.mesh
def test_spikes_may_be_looked_for_from_now_on_and_no_more(finished, lab, tmp_path, capsys):
    run_dir = finished.copy(tmp_path / "run", at=10)
    spikes = ("train.guards.spike.warmup=8", *QUIET)
    run.train(lab.config(run_dir, "train.steps=12", *spikes))
    out = capsys.readouterr().out
    for leaf in ("accepted: expected int32[]", "values: expected float32[128]"):
        line = f"restoring step 10: spike_window/{leaf}, missing from the checkpoint\n"
        assert line in out
    with pytest.raises(ConfigError) as refused:
        run.train(lab.config(run_dir, "train.guards.spike.window=64", *spikes))
    assert "\n  train.guards.spike.window: 128 in the run, 64 now\n" in str(refused.value)
    capsys.readouterr()
    assert run.train(lab.config(run_dir, "train.steps=14", *QUIET)).step == 14
    out = capsys.readouterr().out
    assert "restoring step 12: spike_window/accepted: not expected, found int32[]\n" in out
