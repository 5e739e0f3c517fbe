"""The process group of one attempt: start, output, forwarded signals and a common end."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from shardlib.errors import DistributedError
from shardlib.runtime.exit_codes import DIVERGED, HUNG

POLL_SECONDS = 0.05
# A process that lost a peer may be seen to end before the peer itself.
_SETTLING_SECONDS = 1.0
_LOST_PEER_STATUSES = (HUNG, -signal.SIGABRT)
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Messages of the CPU collectives about each connection, from several threads at once.
_NOISE = re.compile(r"\[Gloo\] Rank \d|Expected number of connected peer ranks")


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a group.

    `index` is the process that failed first, ignoring processes that merely lost their peers; among
    several that ended between two polls it is the lowest. `status` is its exit code, or the
    negative number of the signal that ended it; 0 if all processes succeeded.
    """

    status: int
    index: int = 0
    cause: str | None = None
    """The outside cause that ended the group, such as `SIGINT`; None without one."""

    @property
    def code(self) -> int:
        """The exit code of the launcher, in the convention of shells."""
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def who(self) -> str:
        """The end in words: `process 1 ended by SIGKILL`."""
        meaning = {HUNG: " (it hung, or lost its peers)", DIVERGED: " (it diverged)"}
        how = f"with exit code {self.status}{meaning.get(self.status, '')}"
        if self.status < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"by {names.get(-self.status, f'signal {-self.status}')}"
        return f"process {self.index} ended {how}"


class LineOutput:
    """The output of all processes, until its reader closes it."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._writing = threading.Lock()
        self.closed = False

    def write(self, line: str) -> None:
        # Lines are dropped after the reader has gone: a full pipe would block the process.
        if self.closed:
            return
        try:
            with self._writing:
                self._stream.write(line if line.endswith("\n") else f"{line}\n")
                self._stream.flush()
        except (BrokenPipeError, ValueError):
            self.closed = True
        except OSError:
            pass  # On a full disk the line is lost: its reader, and so the process, must go on.


class PendingSignals:
    """Received signals that still have to be forwarded."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.first: str | None = None
        """Name of the first signal received."""

    def receive(self, number: int) -> None:
        self.pending.append(number)
        self.first = self.first or signal.Signals(number).name


@contextlib.contextmanager
def forwarded_signals() -> Iterator[PendingSignals]:
    """Collects SIGINT, SIGTERM and SIGUSR1 inside the context; only the main thread can."""
    signals = PendingSignals()
    is_main = threading.current_thread() is threading.main_thread()
    former = {
        number: signal.signal(number, lambda number, _: signals.receive(number))
        for number in (_FORWARDED if is_main else ())
    }
    try:
        yield signals
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class LocalProcesses:
    """The running processes of an attempt, and the threads that read their output."""

    def __init__(self, output: LineOutput, signals: PendingSignals, grace_seconds: float):
        self._output, self._signals, self._grace_seconds = output, signals, grace_seconds
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> "LocalProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for reader in self._readers:
            # An orphaned child of a process may hold the pipe open forever.
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
                # A separate group: the terminal's Ctrl-C would otherwise arrive twice.
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

    def wait(self) -> Ending:
        """Waits for the first failure or for all processes to end, and forwards signals."""
        while True:
            while self._signals.pending:
                number = self._signals.pending.pop(0)
                for process in self._processes:
                    process.send_signal(number)
            if self._failed():
                ending = self._first_failure()
                running = sum(process.poll() is None for process in self._processes)
                others = f"; ending the other {running}" if running else ""
                self._output.write(f"[launch] {ending.who}{others}")
                return ending
            if self._output.closed:
                return Ending(-signal.SIGPIPE, cause="the end of its output")
            if all(process.poll() == 0 for process in self._processes):
                return Ending(0)
            time.sleep(POLL_SECONDS)

    def _failed(self) -> dict[int, int]:
        """Returns index and status of each failed process."""
        statuses = {index: process.poll() for index, process in enumerate(self._processes)}
        return {index: status for index, status in statuses.items() if status}

    def _first_failure(self) -> Ending:
        """Waits a moment for a failure that is not merely a loss of peers."""
        first = next(iter(self._failed()))
        deadline = time.monotonic() + _SETTLING_SECONDS
        while True:
            failed = self._failed()
            own = [index for index, status in failed.items() if status not in _LOST_PEER_STATUSES]
            if own or len(failed) == len(self._processes) or time.monotonic() > deadline:
                index = own[0] if own else first
                return Ending(failed[index], index, self._signals.first)
            time.sleep(POLL_SECONDS)

    def _end(self) -> None:
        """Ends the running processes; a SIGKILL also ends their own children."""
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
                if not _NOISE.search(line):
                    self._output.write(f"[{index}] {line}")
