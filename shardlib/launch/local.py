"""Several processes on this machine, as one group with one output and one exit code."""

import contextlib
import glob
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from shardlib.errors import DistributedError

_POLL_SECONDS = 0.05
# What the CPU collectives say of each of their many connections, from several threads at once.
_NOISE = re.compile(r"\[Gloo\] Rank \d|Expected number of connected peer ranks")


def shardlib_command(arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs `shardlib <arguments>` with this very Python."""
    return [sys.executable, "-m", "shardlib.cli", *arguments]


def run_local(
    command: Sequence[str],
    processes: int,
    *,
    environment: Mapping[str, str] | None = None,
    grace_seconds: float = 10.0,
    output: TextIO | None = None,
) -> int:
    """Runs a command as a group of processes that `distributed.initialize` joins on loopback.

    Each line that process 1 writes, on either stream, comes out as `[1] line` (but for those in
    which Gloo reports that its connections are as they should be). The first process that fails
    ends the others: SIGTERM, and SIGKILL after the grace. SIGINT and SIGTERM are passed on, once
    each time they come, and the processes decide. GPUs are shared out evenly.

    Args:
        command: Program and arguments, the same for every process.
        processes: How many to start.
        environment: Variables of the processes; default `os.environ`.
        grace_seconds: Time between SIGTERM and SIGKILL.
        output: Where lines go; default `sys.stdout`.

    Returns:
        0, or the exit code of the first process that failed (128 + n when signal n ended it).

    Raises:
        DistributedError: If there is no process to start, the command does not exist, or the
            processes do not divide the GPUs.
    """
    if processes < 1:
        raise DistributedError(f"{processes} processes cannot be started.\n  Start at least one.")
    variables = _variables(dict(os.environ if environment is None else environment), processes)
    group = _Group(output or sys.stdout, grace_seconds)
    with _passing_on(group), group:
        for index in range(processes):
            group.start(command, variables[index])
        return group.wait()


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


def _variables(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
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


class _Group:
    """The running processes and the threads that read them."""

    def __init__(self, output: TextIO, grace_seconds: float):
        self._output, self._grace_seconds = output, grace_seconds
        self._writing = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._output_closed = False
        self.pending: list[int] = []
        """Signals to pass on; appended to by signal handlers."""

    def __enter__(self) -> "_Group":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for reader in self._readers:
            # A process that a process left behind may hold the pipe open for good.
            reader.join(self._grace_seconds)

    def start(self, command: Sequence[str], variables: dict[str, str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                # A group of its own: the terminal's Ctrl-C would come twice otherwise.
                process_group=0,
            )
        except OSError as error:
            raise DistributedError(
                f"cannot start {command[0]!r}: {error.strerror}.\n"
                "  Give a program on the PATH, or its full path."
            ) from None
        index = len(self._processes)
        self._processes.append(process)
        reader = threading.Thread(target=self._copy, args=(index, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def wait(self) -> int:
        """Waits for the first failure or for all to end, passing signals on."""
        while True:
            while self.pending:
                number = self.pending.pop(0)
                for process in self._processes:
                    process.send_signal(number)
            codes = [process.poll() for process in self._processes]
            failed = [index for index, code in enumerate(codes) if code]
            if failed:
                return self._fail(failed[0], codes[failed[0]] or 0)
            if self._output_closed:
                return 128 + signal.SIGPIPE
            if None not in codes:
                return 0
            time.sleep(_POLL_SECONDS)

    def _fail(self, index: int, code: int) -> int:
        how = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        others = sum(process.poll() is None for process in self._processes)
        ending = f"; ending the other {others}" if others else ""
        self._write(f"[launch] process {index} ended {how}{ending}\n")
        return code if code > 0 else 128 - code

    def _end(self) -> None:
        """Ends what still runs, with the processes that these have started themselves."""
        deadline = time.monotonic() + self._grace_seconds
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _copy(self, index: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if _NOISE.search(line):
                    continue
                self._write(f"[{index}] {line}" if line.endswith("\n") else f"[{index}] {line}\n")

    def _write(self, text: str) -> None:
        # Reading goes on when nobody listens any more, or the process would block in a full pipe.
        if self._output_closed:
            return
        try:
            with self._writing:
                self._output.write(text)
                self._output.flush()
        except (BrokenPipeError, ValueError):
            self._output_closed = True


@contextlib.contextmanager
def _passing_on(group: _Group) -> Iterator[None]:
    """Collects SIGINT and SIGTERM for the group while it runs; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {
        number: signal.signal(number, lambda number, _: group.pending.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
