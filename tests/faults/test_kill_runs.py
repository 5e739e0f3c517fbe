"""Whole runs killed at random times: what they lose is time, and never a number."""

import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest

from shardlib.checkpoint import RunCheckpoints

QUIET = ("eval.every_steps=0", "train.sample_length=0", "train.cpu_devices=4", "mesh=fsdp=4")
OFTEN = ("checkpoint.every_steps=2", "checkpoint.keep=2", "train.log_every=50")

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds processes in /proc"),
]


def losses(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def children(pid):
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def kill_now_and_then(launcher, run_dir, kills, rng):
    """Kills a process of the group, each time after the group has got on; returns how often."""
    metrics = run_dir / "metrics.jsonl"
    for done in range(kills):
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        deadline = time.monotonic() + 120
        while not metrics.exists() or metrics.stat().st_mtime_ns == before:
            if launcher.poll() is not None:
                return done
            assert time.monotonic() < deadline, "it does not get on"
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 1))
        if found := children(launcher.pid):
            os.kill(rng.choice(found), signal.SIGKILL)
            time.sleep(0.2)
    return kills


def check_killed_runs(lab, root, *, processes, kills, steps, seed):
    """A run that is killed over and over ends as one that was left alone."""
    words = ("train", lab.config_file, f"train.steps={steps}", *QUIET, *OFTEN)
    # A kill may come before anything new is saved, any number of times.
    launch = ("launch", "--processes", processes, "--restarts", kills, "--")
    alone, run_dir = root / "alone", root / "killed"
    done = lab.shardlib(*launch, *words, f"run_dir={alone}")
    assert done.returncode == 0, done.stdout
    output = root / "output.txt"
    with (
        open(output, "w") as file,
        subprocess.Popen(
            lab.command(*launch, *words, f"run_dir={run_dir}"), stdout=file, stderr=file
        ) as launcher,
    ):
        count = kill_now_and_then(launcher, run_dir, kills, random.Random(seed))
        assert launcher.wait(300) == 0, output.read_text()
    assert output.read_text().count("[launch] starting again in ") == count, output.read_text()
    assert losses(run_dir) == losses(alone)
    with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.steps() == checkpoints.candidates() == [steps - 2, steps]
        for step in checkpoints.steps():
            found = checkpoints.verify(step)
        with RunCheckpoints(alone / "checkpoints") as reference:
            assert found.fingerprints == reference.manifest(steps).fingerprints
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} <= {
        *(f"{step:08d}" for step in checkpoints.steps()),
        ".trash",
    }
    return count


def test_a_run_that_is_killed(lab, tmp_path):
    assert check_killed_runs(lab, tmp_path, processes=1, kills=1, steps=40, seed=0) == 1


@pytest.mark.soak
# More steps than are taken between the kills.
@pytest.mark.parametrize(("processes", "steps"), [(1, 600), (2, 300)])
def test_runs_that_are_killed_fifty_times(processes, steps, lab, tmp_path):
    count = check_killed_runs(
        lab, tmp_path, processes=processes, kills=25, steps=steps, seed=processes
    )
    assert count == 25


def test_sigterm_ends_a_run_that_prepares_its_data(lab, tmp_path):
    """One line of 20 MB without a space takes a minute to tokenise, which the run reports."""
    text, run_dir = tmp_path / "text.txt", tmp_path / "run"
    text.write_bytes(random.Random(0).randbytes(10_000_000).hex().encode())
    eval_text = tmp_path / "eval.txt"
    eval_text.write_text("a b c")
    data = (f"data.path={text}", f"data.eval_path={eval_text}", "data.tokenizer=bpe")
    words = ("train", lab.config_file, f"run_dir={run_dir}", "model.vocab_size=null", *data, *QUIET)
    with subprocess.Popen(
        lab.command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr.readline().endswith(", once, into the cache: 5 s so far\n")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=5)
    assert process.returncode == -signal.SIGTERM
    assert not run_dir.exists()
