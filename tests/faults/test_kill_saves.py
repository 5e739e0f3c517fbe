"""Processes killed at any moment of saving, deleting and restoring lose nothing that was listed."""

import os
import pathlib
import random
import socket
import subprocess
import sys
import time
from collections import Counter

import jax
import pytest
import saving_run

from shardlib.checkpoint import RunCheckpoints

pytestmark = pytest.mark.process

START_SECONDS = 60


def start(directory, count):
    script = pathlib.Path(saving_run.__file__)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    processes = []
    for index in range(count):
        command = [sys.executable, script, directory / "checkpoints", index, count, port]
        with (directory / f"out-{index}").open("w") as output:
            processes.append(
                subprocess.Popen(
                    list(map(str, command)),
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def wait_for(text, directory, processes):
    deadline = time.monotonic() + START_SECONDS
    while any(
        text not in (directory / f"out-{index}").read_text() for index in range(len(processes))
    ):
        for index, process in enumerate(processes):
            assert process.poll() is None, (directory / f"out-{index}").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_deletion(directory, processes):
    deadline = time.monotonic() + START_SECONDS
    while not (directory / "checkpoints" / ".trash").is_dir():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < deadline


def found_by_kill(directory, count):
    """What the processes were at when they were killed, by what they have left."""
    names = os.listdir(directory / "checkpoints") if (directory / "checkpoints").is_dir() else []
    said = [(directory / f"out-{index}").read_text() for index in range(count)]
    return {
        "save": any(name.endswith("-tmp") for name in names),
        "deletion": ".trash" in names,
        "restore": any("restoring" in text and "restored" not in text for text in said),
    }


def kill_once(directory, count, chance, moments):
    """Starts processes on what is there, and kills them at one of the moments or soon after it."""
    processes = start(directory, count)
    try:
        moment = chance.choice(moments)
        if moment == "deleting":
            wait_for_deletion(directory, processes)
        else:
            wait_for(moment, directory, processes)
            # A restore is over soon.
            time.sleep(chance.uniform(0, 0.1 if moment == "restoring" else 0.4))
        assert all(process.poll() is None for process in processes)
        chance.shuffle(processes)
        for process in processes:
            process.kill()
            time.sleep(chance.choice([0, 0, 0.1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found_by_kill(directory, count)


def check(directory):
    """Every listed checkpoint is whole, and the newest restores bit for bit; returns its step."""
    place = saving_run.placement(jax.devices()[:4])
    target = saving_run.state_of(0, place)
    told = []
    with RunCheckpoints(directory / "checkpoints", notify=told.append) as checkpoints:
        steps = checkpoints.steps()
        for step in steps:
            checkpoints.verify(step)
        if steps:
            saving_run.assert_is(checkpoints.restore(steps[-1], target), steps[-1], place)
    assert told == []
    return steps[-1] if steps else 0


def check_nothing_is_left(directory):
    with RunCheckpoints(directory / "checkpoints") as checkpoints:
        checkpoints.clean()
    entries = os.listdir(directory / "checkpoints")
    assert sorted(entries) == [f"{step:08d}" for step in checkpoints.steps()]


@pytest.mark.parametrize(
    ("count", "kills"),
    [
        (1, 4),
        (2, 3),
        pytest.param(1, 25, marks=pytest.mark.soak),
        pytest.param(2, 25, marks=pytest.mark.soak),
    ],
)
def test_killed_at_any_moment(count, kills, tmp_path):
    seed = int.from_bytes(os.urandom(4)) if kills > 4 else count
    chance, newest, hit = random.Random(seed), 0, Counter()
    print("seed", seed)
    for _ in range(kills):
        # Within saves and deletions; within a restore too, once there is something to restore.
        moments = ["saving"] if newest == 0 else ["restoring", "saving", "deleting"]
        hit.update(kill_once(tmp_path, count, chance, moments))
        found = check(tmp_path)
        assert found >= newest
        newest = found
    assert newest > 0
    if kills > 4:
        assert min(hit["save"], hit["deletion"], hit["restore"]) > 0, hit
    check_nothing_is_left(tmp_path)
