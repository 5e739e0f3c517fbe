"""Launch of several processes on this machine as one group with one output and exit code."""

import glob
import os
import pathlib
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from shardlib.errors import DistributedError
from shardlib.runtime.launch.group import (
    POLL_SECONDS,
    Ending,
    LineOutput,
    LocalProcesses,
    PendingSignals,
    forwarded_signals,
)
from shardlib.runtime.launch.progress import (
    PROGRESS_VARIABLE,
    RESTARTS_VARIABLE,
    Progress,
    read_progress,
)
from shardlib.runtime.launch.restarts import Restarts


def shardlib_command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs `shardlib <arguments>` with the current Python; a leading
    `shardlib` may be given or left out."""
    words = arguments[1:] if arguments[:1] == ["shardlib"] else arguments
    return [sys.executable, "-m", "shardlib.cli", *words]


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

    Each line that process 1 writes, on either stream, appears as `[1] line`, except for Gloo's
    reports of healthy connections. The first process that fails ends the others: SIGTERM, and
    SIGKILL after the grace period. SIGINT, SIGTERM and SIGUSR1 are forwarded each time they arrive,
    and the processes decide. The processes share GPUs evenly. `Restarts` decides whether a failed
    group is started again, unless a signal to this process ended it; one line reports it each time.

    Args:
        command: Program and arguments, the same for every process.
        processes: Number of processes to start.
        restarts: Number of attempts in a row that may save nothing new and still be followed by
            another.
        environment: Variables of the processes; default `os.environ`.
        grace_seconds: Time between SIGTERM and SIGKILL.
        output: Stream for the lines; default `sys.stdout`.

    Returns:
        0, or the exit code of the process that failed first in the last attempt, see `Ending`
        (128 + n when signal n ended it). Processes that only lost their peers do not count.

    Raises:
        DistributedError: If `processes` is below 1, the command does not exist, or the processes do
            not divide the GPUs.
    """
    if processes < 1:
        raise DistributedError(f"{processes} processes cannot be started.\n  Start at least one.")
    if restarts < 0:
        raise DistributedError(f"{restarts} restarts are impossible.\n  Give 0 for none.")
    variables = dict(os.environ if environment is None else environment)
    variables[RESTARTS_VARIABLE] = str(restarts)
    lines, judge = LineOutput(output or sys.stdout), Restarts(restarts)
    with forwarded_signals() as signals:
        while True:
            group = LocalProcesses(lines, signals, grace_seconds)
            ending, progress = _attempt(group, command, group_variables(variables, processes))
            if not restarts or not ending.code:
                return ending.code
            decision = judge.judge(ending, progress)
            lines.write(f"[launch] {decision.reason}")
            if not decision.again:
                return ending.code
            if not _back_off(decision.backoff_seconds, signals):
                lines.write(f"[launch] not started again: {signals.first} ended it")
                return ending.code


def _attempt(
    group: LocalProcesses, command: Sequence[str], environments: Sequence[dict[str, str]]
) -> tuple[Ending, Progress]:
    """Runs a group once; returns its end and the combined progress of its processes."""
    with tempfile.TemporaryDirectory(prefix="shardlib-launch-") as directory:
        files = [str(pathlib.Path(directory, str(index))) for index in range(len(environments))]
        with group:
            for variables, file in zip(environments, files, strict=True):
                group.start(command, variables | {PROGRESS_VARIABLE: file})
            ending = group.wait()
        # Terminated processes may have saved on their way out.
        reports = [read_progress(file) for file in files]
    failures = [report.failure for report in (reports[ending.index], *reports) if report.failure]
    # Some may have ended before they could report that the run went back.
    rewound = [report for report in reports if report.rewound_to is not None]
    saved = [r.saved_step for r in rewound or reports if r.saved_step is not None]
    rewound_to = min((r.rewound_to for r in rewound if r.rewound_to is not None), default=None)
    return ending, Progress(max(saved, default=None), next(iter(failures), None), rewound_to)


def _back_off(seconds: float, signals: PendingSignals) -> bool:
    """Waits, and returns whether to go on: False if a signal came meanwhile."""
    deadline = time.monotonic() + seconds
    while not signals.first and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return not signals.first


def gpu_shares(environment: Mapping[str, str], num_gpus: int, processes: int) -> list[str] | None:
    """Returns `CUDA_VISIBLE_DEVICES` for each process, or None if GPUs are not used.

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
    """Returns the environment of each process of a group on this machine, with a free port.

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
