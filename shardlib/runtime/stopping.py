"""Stop on a signal: all processes stop after the same step, whichever of them got the signal."""

import contextlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import jax

from shardlib.errors import PeerLostError
from shardlib.runtime import preemption

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
# Time for a handler to run if it can, and time to reach the main thread at all.
_HANDLER_SECONDS = 0.1
_UNREACHABLE_SECONDS = 2.0
_INTERRUPTED = 130
_generations = itertools.count()


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service: a key-value store and barriers.

    The service runs on the hosts, so that nothing here waits for a device. JAX has no public API
    for it; Orbax and Levanter access it in the same way.
    """
    from jax._src import distributed

    return distributed.global_state.client


def process_index() -> int:
    """Returns this process's index in its group without starting devices, unlike JAX's function."""
    from jax._src import distributed

    return distributed.global_state.process_id or 0


class StopRequest:
    """Turns signals and preemption notices into a stop request that a loop obeys after a step.

    The signals are Ctrl-C, SIGTERM and Slurm's warning (SIGUSR1); the notices are from
    `preemption`.

    ```python
    with StopRequest() as stop:
        for step in range(start, steps):
            state, metrics = train_step(state, batch)
            if stop.agreed(step):
                break
    ```

    The second Ctrl-C raises KeyboardInterrupt at once. If the main thread hangs in a collective and
    cannot be reached, it ends the process two seconds later. On exit the previous handlers are
    restored. Python lets only the main thread handle signals: in any other thread, only notices and
    `request()` can request a stop.

    The stop waits for the current step, and for its compilation if needed. A process killed while
    compiling the first step loses nothing: nothing was trained since the last save.

    With several processes, a thread of each polls the coordination service. Once one process is
    asked to stop, each publishes the last step it has passed and holds at its next one; all then
    continue to the step after the highest published one. No device takes part, and a step costs no
    more than a lock.

    Every process must enter in the same order as the others, and ask for the same increasing steps.
    """

    def __init__(
        self,
        *,
        notices: Sequence[preemption.Notice] | None = None,
        poll_seconds: float | None = None,
        timeout_seconds: float = 300.0,
    ):
        """Makes a request without a pending stop.

        Args:
            notices: Preemption notices, each polled in a thread; default: the machine's own
                (`preemption.notices`).
            poll_seconds: Time between two checks for a stop of another process. The default is a
                quarter of a second, and more above 500 processes, so that the coordinator answers
                at most 2,000 requests a second.
            timeout_seconds: Time to wait for the answers of all processes.
        """
        self._poll_seconds = poll_seconds
        self._timeout_seconds = timeout_seconds
        self._notices = notices
        self._watch: preemption.NoticeWatch | None = None
        self.own_reason: str | None = None
        """The reason given to this process itself."""
        self._is_requested = False
        self.is_interrupted = False
        """Whether KeyboardInterrupt was raised."""
        self._interrupts = 0
        self._announced = threading.Lock()
        self._reader: _SignalReader | None = None
        self._former: dict[int, Any] = {}
        self._agreement: _Agreement | None = None

    def __enter__(self) -> "StopRequest":
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            self._agreement = _Agreement(self, self._poll_seconds, self._timeout_seconds)
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                self._former[number] = signal.signal(number, self._handle)
            self._reader = _SignalReader.begin(self)
        if self._agreement:
            self._agreement.start()
        notices = preemption.notices() if self._notices is None else self._notices
        self._watch = preemption.NoticeWatch(notices, self.noticed)
        return self

    def __exit__(self, *_: object) -> None:
        if self._watch:
            self._watch.end()
        if self._reader:
            self._reader.end()
        for number, handler in self._former.items():
            # None means a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()
        if self._agreement:
            self._agreement.leave()

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop, or knows that another one was."""
        return self._is_requested or (self._agreement is not None and self._agreement.voted)

    @property
    def reason(self) -> str | None:
        """The reason to stop, such as `SIGTERM`, or `SIGTERM (process 3)` for another process.

        None without a request or without a given reason.
        """
        if self.own_reason is None and self._agreement:
            return self._agreement.reason
        return self.own_reason

    def request(self, reason: str | None = None) -> None:
        """Requests a stop, as a signal does, for a reason in words that follow "stopped by"."""
        self.own_reason = self.own_reason or reason
        self._is_requested = True

    def agreed(self, step: int) -> bool:
        """Whether to stop now that `step` is done; all processes get the same answer.

        Raises:
            PeerLostError: If some process does not report its step in time, or has gone.
        """
        if self._agreement:
            return self._agreement.reached(step)
        return self._is_requested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only plain attributes are set: the handler may run while any lock is held.
        if number == signal.SIGINT:
            self._interrupts += 1
            # Python merges two signals that arrive while no handler can run.
            if max(self._interrupts, self._reader.interrupts if self._reader else 0) > 1:
                self.is_interrupted = True
                raise KeyboardInterrupt
        self.noticed(signal.Signals(number).name)

    def noticed(self, reason: str) -> None:
        """Requests a stop, and prints a line for the first request."""
        self.request(reason)
        if self._announced.acquire(blocking=False):
            again = "; Ctrl-C again ends at once" if reason == "SIGINT" else ""
            os.write(2, f"\n{reason}: stopping after this step{again}.\n".encode())


class _SignalReader(threading.Thread):
    """Receives signals while the main thread is in C++ and cannot run handlers.

    In that case Python only records the signal and writes its number to a file.
    """

    _active: "_SignalReader | None" = None

    def __init__(self, stop: StopRequest):
        super().__init__(name="shardlib-signals", daemon=True)
        self._stop_request = stop
        self.interrupts = 0
        self._over = threading.Event()
        self._from, self._to = os.pipe()
        os.set_blocking(self._to, False)

    @classmethod
    def begin(cls, stop: StopRequest) -> "_SignalReader | None":
        """Starts a reader; None if an event loop (asyncio's, Jupyter's) already reads signals."""
        reader = cls(stop)
        former = signal.set_wakeup_fd(reader._to, warn_on_full_buffer=False)
        if former != -1:
            signal.set_wakeup_fd(former)
            reader._close()
            return None
        _SignalReader._active = reader
        reader.start()
        return reader

    def end(self) -> None:
        signal.set_wakeup_fd(-1)
        _SignalReader._active = None
        self._over.set()
        os.write(self._to, b"\0")
        self.join()
        self._close()

    def _close(self) -> None:
        os.close(self._from)
        os.close(self._to)

    def run(self) -> None:
        while True:
            for number in os.read(self._from, 64):
                if not number:
                    return
                if number in _HANDLED:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        self.interrupts += number == signal.SIGINT
        if self._over.wait(_HANDLER_SECONDS):  # The handler goes first if it can run.
            return
        self._stop_request.noticed(signal.Signals(number).name)
        if number != signal.SIGINT or self.interrupts < 2 or self._over.wait(_UNREACHABLE_SECONDS):
            return
        if not self._stop_request.is_interrupted:
            os.write(2, b"\nSIGINT: ending at once.\n")
            os._exit(_INTERRUPTED)


def _leave_to_parent() -> None:
    # A forked child inherits the file, but must not pass its signals to the parent.
    if _SignalReader._active:
        _SignalReader._active = None
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_to_parent)


class _Agreement(threading.Thread):
    """The agreement of one process with the others on a common last step.

    Keys under the prefix: `vote/<process>` holds the last step that the process has passed; the
    process waits at its next step until all have voted. `left/<process>` holds the same for a
    process whose loop is over. Each value includes the reason given to that process, if any. Any
    vote makes the other processes vote.
    """

    def __init__(self, stop: StopRequest, poll_seconds: float | None, timeout_seconds: float):
        super().__init__(name="shardlib-stop", daemon=True)
        self._stop_request = stop
        self._client = coordination_client()
        self._index, self._count = jax.process_index(), jax.process_count()
        self._prefix = f"shardlib/stop/{next(_generations)}"
        self._poll_seconds = poll_seconds or max(0.25, self._count / 2000)
        self._timeout_seconds = timeout_seconds
        self._leaving = threading.Event()
        self._changed = threading.Condition()
        # The attributes below are guarded by _changed.
        self._last_step = -1
        self.voted = False
        self.reason: str | None = None
        self._last_of_all: int | None = None
        self._silent: list[int] = []
        self._failure: BaseException | None = None

    def reached(self, step: int) -> bool:
        with self._changed:
            if not self._changed.wait_for(self._settled, self._timeout_seconds):
                raise PeerLostError(
                    f"process {self._index} waited {self._timeout_seconds:g} s to agree on the "
                    f"step to stop after; no answer came from {self._silent}.\n"
                    "  Look at the output of these processes: they have failed or hang."
                )
            if self._failure is not None:
                raise PeerLostError(
                    f"the processes could not agree on a step to stop after: {self._failure}\n"
                    "  The coordinator (process 0) has gone; start all processes again."
                ) from self._failure
            if self._last_of_all is not None and step > self._last_of_all:
                return True
            self._last_step = step
            return False

    def _settled(self) -> bool:
        return not self.voted or self._last_of_all is not None or self._failure is not None

    def run(self) -> None:
        try:
            while not self._leaving.wait(self._poll_seconds):
                if self._stop_request.requested or self._answers("vote"):
                    self._vote()
                    self._collect()
                    return
        except Exception as error:  # Raised again in the thread of the loop.
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def leave(self) -> None:
        """Ends the thread, and tells the others not to wait for this process."""
        self._leaving.set()
        self.join()
        if not self.voted and self._failure is None:
            # After the coordinator has gone, no process waits for an answer.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._publish("left")

    def _vote(self) -> None:
        with self._changed:
            self.voted = True
        # From here on reached() blocks, so that the step cannot change.
        self._publish("vote")

    def _publish(self, kind: str) -> None:
        answer = json.dumps([self._last_step, self._stop_request.own_reason])
        self._client.key_value_set(f"{self._prefix}/{kind}/{self._index}", answer)

    def _answers(self, kind: str) -> dict[int, tuple[int, str | None]]:
        """Returns the answer of each process: the last step it has passed, and its reason."""
        entries = self._client.key_value_dir_get(f"{self._prefix}/{kind}/")
        return {int(key.rpartition("/")[2]): tuple(json.loads(value)) for key, value in entries}

    def _collect(self) -> None:
        while True:
            answers = self._answers("left") | self._answers("vote")
            with self._changed:
                self._silent = sorted(set(range(self._count)) - set(answers))
                if not self._silent:
                    reasons = [f"{why} (process {i})" for i, (_, why) in answers.items() if why]
                    self.reason = min(reasons, default=None)
                    self._last_of_all = max(step for step, _ in answers.values())
                    self._changed.notify_all()
                    return
            if self._leaving.wait(min(self._poll_seconds, 0.05 * max(1, self._count / 100))):
                return
