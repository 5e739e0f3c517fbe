"""Full disks, lost permission, writes that fail: told once, space given back, training goes on."""

import contextlib
import os
import resource
import subprocess
import time

import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.checkpoint import CheckpointConfig, RunCheckpoints
from shardlib.errors import CheckpointError
from shardlib.log.metrics import read_metrics

MIB = 2**20


def make_state(step):
    return {"w": jnp.arange(MIB / 4) + step, "step": step}


def assert_restores(checkpoints, step):
    restored = checkpoints.restore(step, make_state(0))
    assert restored["step"] == step
    np.testing.assert_array_equal(restored["w"], make_state(step)["w"])


def free_bytes(directory):
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@contextlib.contextmanager
def failing_writes(num_bytes):
    """No file of this process can grow beyond so many bytes: a write fails as on a bad disk."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


def test_a_full_disk(small_disk, capfd):
    told = []
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2 * MIB))
    checkpoints = RunCheckpoints(small_disk / "c", notify=told.append)
    checkpoints.save(1, make_state(1), {}, wait=True)
    free = free_bytes(small_disk)
    checkpoints.save(2, make_state(2), {})
    while not told:
        checkpoints.poll()
    assert free_bytes(small_disk) == free
    assert os.listdir(small_disk / "c") == ["00000001"]
    (text,) = told
    first, last = text.splitlines()
    assert first.startswith(f"the checkpoint of step 2 could not be written to {small_disk}/c: ")
    assert "No space left on device" in first
    assert last == "  Free space or restore access there; complete steps: 1."
    filler.unlink()
    checkpoints.save(3, make_state(3), {})
    checkpoints.close()
    assert checkpoints.steps() == [1, 3]
    assert_restores(checkpoints, 3)
    assert len(told) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.process
def test_a_run_outlives_a_full_disk(small_disk, lab, tmp_path):
    """Saves fail until there is room again; metrics, which have room, are all written."""
    filler, run_dir, output = small_disk / "filler", small_disk / "run", tmp_path / "output.txt"
    filler.write_bytes(bytes(3 * MIB))
    words = ("train.steps=300", "checkpoint.every_steps=10", "checkpoint.keep=1")
    words += ("checkpoint.max_failures=1000",)
    words += (f"run_dir={run_dir}", "eval.every_steps=0", "train.sample_length=0")
    with (
        open(output, "w") as file,
        subprocess.Popen(
            lab.command("train", lab.config_file, *words), stdout=file, stderr=file
        ) as trained,
    ):
        while "could not be written" not in output.read_text() and trained.poll() is None:
            time.sleep(0.01)
        filler.unlink()
        assert trained.wait(120) == 0, output.read_text()
    told = [line for line in output.read_text().splitlines() if "could not be written" in line]
    assert told
    assert all("checkpoint of step" in line and "No space left" in line for line in told)
    assert [row["step"] for row in read_metrics(run_dir)] == list(range(1, 301))
    with RunCheckpoints(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.steps()[-1] == 300
        for step in checkpoints.steps():
            checkpoints.verify(step)
    assert sorted(os.listdir(run_dir / "checkpoints")) == [f"{s:08d}" for s in checkpoints.steps()]


def test_too_many_failures_in_a_row_end_the_run(tmp_path):
    told = []
    config = CheckpointConfig(max_failures=2)
    with RunCheckpoints(tmp_path, config, notify=told.append) as checkpoints:
        checkpoints.save(1, make_state(1), {}, wait=True)
        with failing_writes(MIB // 2):
            checkpoints.save(2, make_state(2), {})
            checkpoints.settle()
        checkpoints.save(3, make_state(3), {})  # A good one starts the count again.
        checkpoints.settle()
        with failing_writes(MIB // 2):
            for step in (4, 5):
                checkpoints.save(step, make_state(step), {})
            with pytest.raises(CheckpointError, match=r"2 .* last good step is 3.\n  Free space"):
                checkpoints.save(6, make_state(6), {})
    assert [text.split(" could")[0] for text in told] == [
        f"the checkpoint of step {step}" for step in (2, 4, 5)
    ]
