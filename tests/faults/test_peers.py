"""A process that dies, freezes or stands still takes the others with it, soon and with one code."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from shardlib.runtime.exit_codes import HUNG
from shardlib.runtime.launch.local import group_variables

RUN = pathlib.Path(__file__).with_name("summing_run.py")
WAIT_SECONDS = 60


class Peers:
    """Processes of one group, started without a launcher, which would end them itself."""

    def __init__(self, directory, count, *arguments):
        self.directory = directory
        self.files = [directory / f"output-{index}" for index in range(count)]
        self.processes = []
        command = [sys.executable, RUN, directory, *map(str, arguments)]
        own = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        for environment, file in zip(group_variables(own, count), self.files, strict=True):
            with file.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )

    def output(self, index):
        return self.files[index].read_text()

    def wait_for(self, text, index):
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.output(index):
            assert time.monotonic() < deadline, self.output(index)
            assert self.processes[index].poll() is None, self.output(index)
            time.sleep(0.02)

    def running(self):
        for index in range(len(self.processes)):
            self.wait_for("pid", index)
        return self

    def codes(self, *, but=()):
        """Exit codes of the processes, and the seconds until the last has ended."""
        start = time.monotonic()
        left = [process for index, process in enumerate(self.processes) if index not in but]
        codes = [process.wait(WAIT_SECONDS) for process in left]
        return codes, time.monotonic() - start

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    groups = []

    def start(*, count=2, heartbeat=60, limit="none", fault="deadlock"):
        groups.append(Peers(tmp_path, count, heartbeat, limit, fault))
        return groups[-1].running()

    yield start
    for group in groups:
        group.end()


LAST_WORDS = re.compile(
    r"process \d+ has lost other processes of its group(?:, as said above)?: ending with exit "
    rf"code {HUNG}\.\n"
)


@pytest.mark.process
def test_a_signal_to_one_stops_all_after_the_same_step(start):
    peers = start()
    os.kill(peers.processes[1].pid, signal.SIGTERM)
    codes, seconds = peers.codes()
    assert codes == [0, 0], peers.output(0) + peers.output(1)
    assert seconds < 5
    ends = [peers.output(index).splitlines()[-1] for index in (0, 1)]
    step = re.fullmatch(r"stopped after step (\d+) by SIGTERM \(process 1\)", ends[0])[1]
    assert ends[1] == f"stopped after step {step} by SIGTERM"


@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_is_killed(start, victim):
    peers = start()
    peers.processes[victim].kill()
    codes, seconds = peers.codes(but=[victim])
    output = peers.output(1 - victim)
    assert codes == [HUNG], output
    assert seconds < 5
    assert LAST_WORDS.search(output)


@pytest.mark.process
def test_a_coordinator_that_freezes(start):
    peers = start(heartbeat=2)
    peers.processes[0].send_signal(signal.SIGSTOP)
    codes, seconds = peers.codes(but=[0])
    output = peers.output(1)
    assert codes == [HUNG], output
    assert seconds < 2 + 5
    assert "process 1 has lost other processes of its group, as said above: ending with" in output


@pytest.mark.process
def test_a_peer_that_stands_still_in_python(start, tmp_path):
    peers = start(limit=1)
    peers.processes[1].send_signal(signal.SIGUSR2)
    codes, seconds = peers.codes()
    assert codes == [HUNG, HUNG], peers.output(0) + peers.output(1)
    assert seconds < 1 + 5
    # Whoever is the first to notice, the other has lost a peer then.
    stacks = [tmp_path / f"stacks-process{index}.txt" for index in (0, 1)]
    noticed = [index for index in (0, 1) if stacks[index].exists()]
    for index in noticed:
        assert re.search(
            rf"\nprocess {index}: no progress in phase 'step' for \d+ s \(its limit: 1 s\); "
            rf"stacks in {stacks[index]}, exit code {HUNG}\n",
            peers.output(index),
        )
    where = {0: "in main", 1: "in fail"}
    assert noticed
    assert all(where[index] in stacks[index].read_text() for index in noticed)


@pytest.mark.process
def test_the_watchdog_sees_a_collective_that_waits_for_a_frozen_peer(start, tmp_path):
    peers = start(limit=1)
    peers.processes[1].send_signal(signal.SIGSTOP)
    codes, seconds = peers.codes(but=[1])
    assert codes == [HUNG], peers.output(0)
    assert 1 < seconds < 1 + 5
    stacks = (tmp_path / "stacks-process0.txt").read_text()
    # Where the sum is waited for.
    line = 1 + RUN.read_text().splitlines().index("            x = jax.block_until_ready(mean(x))")
    assert re.search(rf'summing_run\.py", line {line} in main\n', stacks)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["kill", "freeze", "deadlock", "lock"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_every_other_of_four_ends(start, victim, how):
    """Twice in a row: how a process notices depends on what it was doing."""
    signals = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
    for attempt in range(2):
        peers = start(count=4, heartbeat=5, limit=8, fault=how)
        time.sleep(0.37 * attempt)
        peers.processes[victim].send_signal(signals.get(how, signal.SIGUSR2))
        codes, seconds = peers.codes(but=[victim])
        assert codes == [HUNG] * 3, [peers.output(index) for index in range(4)]
        assert seconds < 8 + 5


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_dies_while_the_other_leaves(start, victim):
    peers = start(heartbeat=5, fault="linger")
    peers.processes[victim].send_signal(signal.SIGUSR2)
    os.kill(peers.processes[0].pid, signal.SIGTERM)
    peers.wait_for("faulty", victim)
    peers.wait_for("stopped", 1 - victim)
    time.sleep(0.5)
    peers.processes[victim].kill()
    codes, seconds = peers.codes(but=[victim])
    assert codes == [HUNG], peers.output(1 - victim)
    assert seconds < 5 + 5


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_launched_group_is_started_again(tmp_path, victim):
    launcher = f"""
import sys
from shardlib.runtime.launch import run_local
sys.exit(run_local([sys.executable, {str(RUN)!r}, {str(tmp_path)!r}, "60", "none", ""], 2,
    restarts=1))
"""
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True, env=variables
    ) as process:
        try:
            os.kill(until_running(process.stdout)[victim], signal.SIGKILL)
            until_running(process.stdout)
            process.send_signal(signal.SIGTERM)
            rest = process.stdout.read()
            assert process.wait(WAIT_SECONDS) == 0, rest
            assert "[1] stopped after step " in rest
        finally:
            process.kill()


def until_running(lines):
    """Waits for both processes of an attempt; returns their ids by index."""
    ids = {}
    while len(ids) < 2:
        line = lines.readline()
        assert line
        if found := re.match(r"\[(\d)\] pid (\d+)", line):
            ids[int(found[1])] = int(found[2])
        if line.startswith("[launch] process"):
            # Who was killed is named, and not who lost a peer by it.
            assert re.match(r"\[launch\] process \d ended by SIGKILL", line), line
    return ids


@pytest.mark.soak
def test_a_process_frozen_for_a_moment_goes_on(start):
    """Not only its own watchdog forgives it: the others wait for it no longer than their limits."""
    peers = start(limit=6)
    for _ in range(3):
        peers.processes[0].send_signal(signal.SIGSTOP)
        time.sleep(3)
        peers.processes[0].send_signal(signal.SIGCONT)
        time.sleep(0.5)
    os.kill(peers.processes[0].pid, signal.SIGUSR1)
    codes, _ = peers.codes()
    assert codes == [0, 0], peers.output(0) + peers.output(1)
    assert "by SIGUSR1 (process 0)\n" in peers.output(1)
