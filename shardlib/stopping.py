"""Stopping on a signal: all processes after the same step, whichever of them the signal reached."""

import contextlib
import itertools
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax

from shardlib.errors import DistributedError

_HANDLED = (signal.SIGINT, signal.SIGTERM)
_generations = itertools.count()


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service: a key-value store and barriers.

    It lives on the hosts, so that nothing here waits for a device. JAX has no public name for it;
    Orbax and Levanter reach it the same way.
    """
    from jax._src import distributed

    return distributed.global_state.client


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a request that a loop can act on after a step.

    ```python
    with StopRequest() as stop:
        for step in range(start, steps):
            state, metrics = train_step(state, batch)
            if stop.agreed(step):
                break
    ```

    The second Ctrl-C raises KeyboardInterrupt at once. On exit the former handlers are back.
    Python lets only the main thread handle signals: in another, `request()` alone asks to stop.

    With several processes a thread of each looks at the coordination service now and then. Once
    one process is asked to stop, each publishes the last step it has gone past and holds at its
    next; all then go on to the step after the highest of these. No device takes part, and a step
    costs no more than a lock.

    Every process must enter in the same order as the others, and ask for the same steps, rising.
    """

    def __init__(self, *, poll_seconds: float | None = None, timeout_seconds: float = 300.0):
        """Makes a request that is not yet asked.

        Args:
            poll_seconds: How often to look whether another process was asked to stop. By default
                a quarter of a second, and more above 500 processes, so that the coordinator
                answers at most 2,000 questions a second.
            timeout_seconds: How long to wait for the answers of all processes.
        """
        self._poll_seconds = poll_seconds
        self._timeout_seconds = timeout_seconds
        self._signal: signal.Signals | None = None
        self._asked = False
        self._interrupts = 0
        self._former: dict[int, Any] = {}
        self._agreement: _Agreement | None = None

    def __enter__(self) -> "StopRequest":
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            self._agreement = _Agreement(self, self._poll_seconds, self._timeout_seconds)
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                self._former[number] = signal.signal(number, self._handle)
        if self._agreement:
            self._agreement.start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former.clear()
        if self._agreement:
            self._agreement.leave()

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop, or knows that another one was."""
        return self._asked or (self._agreement is not None and self._agreement.voted)

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that reached this process, as `SIGTERM`; None if none did."""
        return self._signal.name if self._signal else None

    def request(self) -> None:
        """Asks to stop, as a signal does."""
        self._asked = True

    def agreed(self, step: int) -> bool:
        """Whether to stop now that `step` is done; all processes get the same answer.

        Raises:
            DistributedError: If some process does not say in time how far it is.
        """
        if self._agreement:
            return self._agreement.reached(step)
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Only plain attributes are set: the handler may run while any lock is held.
        first = not self._asked
        self._signal = signal.Signals(number)
        self._asked = True
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        if first:
            again = "; Ctrl-C again ends at once" if number == signal.SIGINT else ""
            notice = f"\n{self._signal.name}: stopping after this step{again}.\n"
            os.write(2, notice.encode())


class _Agreement(threading.Thread):
    """One process's part in finding the step that all can stop after.

    Keys under the prefix: `vote/<process>` is the last step which that process has gone past, and
    it holds at the next until all have voted; `left/<process>` is the same of one whose loop is
    over. Any vote makes the other processes vote.
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
        # What follows is guarded by _changed.
        self._last_step = -1
        self.voted = False
        self._last_of_all: int | None = None
        self._silent: list[int] = []
        self._failure: BaseException | None = None

    def reached(self, step: int) -> bool:
        with self._changed:
            if not self._changed.wait_for(self._settled, self._timeout_seconds):
                raise DistributedError(
                    f"process {self._index} waited {self._timeout_seconds:g} s to agree on the "
                    f"step to stop after; no answer came from {self._silent}.\n"
                    "  Look at the output of these processes: they have failed or hang."
                )
            if self._failure is not None:
                raise DistributedError(
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
        except Exception as error:  # It is raised again in the loop's own thread.
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def leave(self) -> None:
        """Ends the thread, and tells the others not to wait for this process."""
        self._leaving.set()
        self.join()
        if not self.voted and self._failure is None:
            # Where the coordinator has gone nobody is left to wait for an answer.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._publish("left")

    def _vote(self) -> None:
        with self._changed:
            self.voted = True
        # From here on reached() holds, so that the step cannot change any more.
        self._publish("vote")

    def _publish(self, kind: str) -> None:
        self._client.key_value_set(f"{self._prefix}/{kind}/{self._index}", str(self._last_step))

    def _answers(self, kind: str) -> dict[int, int]:
        entries = self._client.key_value_dir_get(f"{self._prefix}/{kind}/")
        return {int(key.rpartition("/")[2]): int(value) for key, value in entries}

    def _collect(self) -> None:
        while True:
            answers = self._answers("left") | self._answers("vote")
            with self._changed:
                self._silent = sorted(set(range(self._count)) - set(answers))
                if not self._silent:
                    self._last_of_all = max(answers.values())
                    self._changed.notify_all()
                    return
            if self._leaving.wait(min(self._poll_seconds, 0.05 * max(1, self._count / 100))):
                return
