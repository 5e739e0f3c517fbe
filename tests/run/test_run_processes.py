"""The same run as several real processes: the same losses, one stop."""

import os
import pathlib
import signal
import subprocess
import time

import numpy as np
import pytest

from shardlib import run
from shardlib.checkpoint import RunCheckpoints
from shardlib.hf.safetensors import Tensors
from shardlib.log.events import read_events

pytestmark = pytest.mark.process

QUIET = ("eval.every_steps=0", "train.sample_length=0")
# Sums over processes are taken in another order; twenty steps of training carry the rounding on.
RELATIVE = 1e-5


@pytest.fixture
def launch(lab):
    started = []

    def start(processes, *words):
        started.append(
            subprocess.Popen(
                lab.command("launch", "--processes", processes, "--", *words),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def children(process):
    text = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds processes in /proc")
def test_a_signal_to_one_of_two_processes_stops_both(launch, lab, finished, tmp_path, losses):
    run_dir = tmp_path / "run"
    process = launch(2, "train", lab.config_file, f"run_dir={run_dir}", *QUIET)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 110
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    asked = time.monotonic()
    os.kill(children(process)[1], signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    seconds = time.monotonic() - asked
    assert (process.returncode, err) == (0, "")
    spent = read_events(run_dir)[-1]["spent"]
    assert seconds < 5 + spent["save"]
    assert "[1] SIGTERM: stopping after this step.\n" in out
    step = len(losses(run_dir))
    assert 5 <= step < 20
    assert f"─ stopped by SIGTERM (process 1) and saved at step {step} ─" in out
    resume = f"shardlib launch --processes 2 -- train {run_dir}/config.yaml\n"
    assert f"\n[0]   resume   {resume}" in out
    assert "8 x cpu in 2 processes" in out
    assert not [line for line in out.splitlines() if line.startswith("[1]") and "loss" in line]
    with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.latest() == step
        assert checkpoints.manifest(step).processes == 2
    # One process goes on where two have stopped.
    run.train(lab.config(run_dir, *QUIET))
    np.testing.assert_allclose(losses(run_dir), losses(finished.run_dir), rtol=RELATIVE)


@pytest.mark.soak
def test_four_processes_compute_what_one_does(launch, lab, finished, tmp_path, losses):
    run_dir = tmp_path / "run"
    fewer = ("train.steps=10", "train.cpu_devices=4", "mesh=fsdp=4", "checkpoint.enabled=false")
    process = launch(4, "train", lab.config_file, f"run_dir={run_dir}", *fewer, *QUIET)
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, ""), out
    np.testing.assert_allclose(losses(run_dir), losses(finished.run_dir)[:10], rtol=RELATIVE)
    # Only the first process prints.
    assert {line[:3] for line in out.splitlines() if "loss" in line} == {"[0]"}
    assert out.count("finished at step 10") == 1


def test_two_processes_train_adapters_as_one_does(launch, lab, finished, tmp_path, losses):
    run.export(str(finished.run_dir), str(tmp_path / "base"))
    words = (f"model.init_from={tmp_path / 'base'}", "finetune.targets=['**/attention/*']")
    words += ("train.steps=5", "checkpoint.every_steps=5", "optimizer.learning_rate=3.0e-2")
    one, two = tmp_path / "one", tmp_path / "two"
    run.train(lab.config(one, *words, *QUIET))
    split = ("train.cpu_devices=4", "mesh=fsdp=2,tensor=2")
    process = launch(2, "train", lab.config_file, f"run_dir={two}", *words, *split, *QUIET)
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, ""), out
    np.testing.assert_allclose(losses(two), losses(one), rtol=RELATIVE)
    adapters = []
    for run_dir in (one, two):
        run.export(str(run_dir), str(run_dir / "adapter"), adapter=True)
        adapters.append(Tensors(run_dir / "adapter", {"adapter_model.safetensors": []}))
    assert adapters[0].keys() == adapters[1].keys()
    for name, value in adapters[0].items():
        assert np.any(value)
        np.testing.assert_allclose(adapters[1][name], value, rtol=1e-3, atol=1e-5)


def test_a_refused_run_ends_every_process(launch, lab, tmp_path):
    words = ("train", lab.config_file, f"run_dir={tmp_path / 'run'}", "mesh=data=3,fsdp=2")
    process = launch(2, *words)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (2, "")
    assert "MeshError: mesh data=3,fsdp=2 needs 6 devices but 8 are available." in out
    assert os.listdir(tmp_path) == []
