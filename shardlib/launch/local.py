"""Several processes on this machine, as one group with one output and one exit code."""

import contextlib
import glob
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from shardlib.errors import DistributedError
from shardlib.launch.group import POLL_SECONDS, Ending, Group, Output, Signals, passed_on
from shardlib.launch.progress import PROGRESS_VARIABLE, RESTARTS_VARIABLE, Progress, read_progress
from shardlib.launch.restarts import Restarts


def shardlib_command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs `shardlib <arguments>` with this very Python."""
    return [sys.executable, "-m", "shardlib.cli", *arguments]


def run_local(
    command: Sequence[str],
    processes: int,
    *,
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    grace_seconds: float = 10.0,
    output: TextIO | None = None,
) -> int:
    """Runs a command as a group of processes that `distributed.initialize` joins on loopback.

    Each line that process 1 writes, on either stream, comes out as `[1] line` (but for those in
    which Gloo reports that its connections are as they should be). The first process that fails
    ends the others: SIGTERM, and SIGKILL after the grace. SIGINT, SIGTERM and SIGUSR1 are passed
    on, once each time they come, and the processes decide. GPUs are shared out evenly.

    A group that fails is started again as `Restarts` says, which the output tells in one line each
    time; one that a signal to this process has ended is not.

    Args:
        command: Program and arguments, the same for every process.
        processes: How many to start.
        restarts: How many attempts in a row may save nothing new and still be followed by another.
        environment: Variables of the processes; default `os.environ`.
        grace_seconds: Time between SIGTERM and SIGKILL.
        output: Where lines go; default `sys.stdout`.

    Returns:
        0, or the exit code of the process that failed first in the last attempt, as `Ending` says
        (128 + n when signal n ended it). Those that only lost their peers do not count as first.

    Raises:
        DistributedError: If there is no process to start, the command does not exist, or the
            processes do not divide the GPUs.
    """
    if processes < 1:
        raise DistributedError(f"{processes} processes cannot be started.\n  Start at least one.")
    if restarts < 0:
        raise DistributedError(f"{restarts} restarts cannot be.\n  Give 0 for none.")
    given = dict(os.environ if environment is None else environment)
    given[RESTARTS_VARIABLE] = str(restarts)
    lines, judge = Output(output or sys.stdout), Restarts(restarts)
    with passed_on() as signals:
        while True:
            with _told(processes) as files:
                with Group(lines, signals, grace_seconds) as group:
                    for variables, file in zip(
                        group_variables(given, processes), files, strict=True
                    ):
                        group.start(command, variables | {PROGRESS_VARIABLE: str(file)})
                    ending = group.wait()
                # Those that were ended may have saved on their way out.
                progress = _progress(files, ending)
            if not restarts or not ending.code:
                return ending.code
            verdict = judge.judge(ending, progress)
            lines.write(f"[launch] {verdict.reason}")
            if not verdict.again:
                return ending.code
            if not _back_off(verdict.backoff_seconds, signals):
                lines.write(f"[launch] not started again: {signals.first} ended it")
                return ending.code


@contextlib.contextmanager
def _told(processes: int) -> Iterator[list[pathlib.Path]]:
    """Files that the processes of one attempt tell their progress in."""
    with tempfile.TemporaryDirectory(prefix="shardlib-launch-") as directory:
        yield [pathlib.Path(directory) / str(index) for index in range(processes)]


def _progress(files: Sequence[pathlib.Path], ending: Ending) -> Progress:
    """What the processes of an attempt have said together."""
    said = [read_progress(file) for file in files]
    own = said[ending.index].failure
    failure = own or next((each.failure for each in said if each.failure), None)
    # Some may have ended before they could tell that the run went back.
    back = [each for each in said if each.rewound_to is not None]
    saved = [each.saved_step for each in back or said if each.saved_step is not None]
    places = [each.rewound_to for each in back if each.rewound_to is not None]
    return Progress(max(saved, default=None), failure, min(places, default=None))


def _back_off(seconds: float, signals: Signals) -> bool:
    """Waits; returns whether to go on, which a signal meanwhile forbids."""
    deadline = time.monotonic() + seconds
    while not signals.first and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return not signals.first


def gpu_shares(environment: Mapping[str, str], num_gpus: int, processes: int) -> list[str] | None:
    """Returns `CUDA_VISIBLE_DEVICES` for each process, or None where GPUs are not used.

    Raises:
        DistributedError: If the processes do not divide the GPUs.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not any(name in platforms for name in ("cuda", "gpu")):
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    ids = [str(i) for i in range(num_gpus)] if visible is None else visible.split(",")
    ids = [entry.strip() for entry in ids if entry.strip()]
    if not ids:
        return None
    share, left = divmod(len(ids), processes)
    if left or not share:
        raise DistributedError(
            f"{processes} processes cannot share the GPUs {','.join(ids)} evenly.\n"
            "  Start as many processes as divide them, or set JAX_PLATFORMS=cpu."
        )
    return [",".join(ids[i * share : (i + 1) * share]) for i in range(processes)]


def group_variables(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
    """Returns the environment of each process of a group on this machine, at a port that is free.

    Raises:
        DistributedError: If the processes do not divide the GPUs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shares = gpu_shares(environment, len(glob.glob("/dev/nvidia[0-9]*")), processes)
    common = {
        "SHARDLIB_COORDINATOR": f"127.0.0.1:{port}",
        "SHARDLIB_NUM_PROCESSES": str(processes),
        "PYTHONUNBUFFERED": "1",
    }
    defaults = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    return [
        defaults
        | environment
        | common
        | {"SHARDLIB_PROCESS_ID": str(index)}
        | ({"CUDA_VISIBLE_DEVICES": shares[index]} if shares else {})
        for index in range(processes)
    ]
