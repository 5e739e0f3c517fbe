"""A watchdog over the phases of a run: it ends a process without progress and dumps its stacks."""

import contextlib
import dataclasses
import faulthandler
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable

from shardlib.config import configclass
from shardlib.runtime.exit_codes import HUNG
from shardlib.runtime.phases import Phase, PhaseClock
from shardlib.runtime.stopping import process_index

# Modules on the stack of a thread that a user is debugging.
_DEBUGGERS = frozenset({"bdb", "pdb", "pydevd", "_pydevd_bundle"})
# Time limit for writing the stacks, since the disk itself may hang.
_WRITING_SECONDS = 10.0


@configclass
class WatchdogConfig:
    """Limits in seconds by phase; null for no limit. Progress within a phase restarts its time."""

    init: float | None = 1800.0
    """Seconds for starting the devices, checking the config and making the first state."""
    compile: float | None = 3600.0
    """Seconds for compiling one program."""
    data_wait: float | None = 900.0
    """Seconds for waiting for one batch."""
    step: float | None = 900.0
    """Seconds for one compiled training step."""
    evaluate: float | None = 3600.0
    """Seconds for one batch of an evaluation, or one sample."""
    save: float | None = 3600.0
    """Seconds that the loop waits for one checkpoint to be written."""
    restore: float | None = 3600.0
    """Seconds for reading a checkpoint."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {limit:g}, but must be above 0, or null for no limit"
            for name, limit in dataclasses.asdict(self).items()
            if limit is not None and not 0 < limit < float("inf")
        ]
        if faults:
            raise ValueError("\n".join(faults))

    def limit(self, phase: Phase) -> float | None:
        """Returns the seconds that a phase may take without progress, or None."""
        return getattr(self, phase)


class Watchdog:
    """Ends the process when it makes no progress, even if its main thread is blocked.

    ```python
    with Watchdog(clock, WatchdogConfig(), run_dir):
        ...
    ```

    When the current phase exceeds its limit, the stacks of all threads go to stderr and to
    `stacks-process<i>.txt`, and the process ends at once with `exit_codes.HUNG`. Each process
    watches itself. If one hangs, the others wait for it in a collective, and end by their own
    watchdogs or, once it has gone, by `peers`.

    Only time that this process could use counts. The sleep of a laptop does not count, since the
    monotonic clock stops. Time in which the process was stopped (SIGSTOP, Ctrl-Z) or starved does
    not count either, since the watchdog's own thread did not run. A main thread in a debugger is
    not hung.

    A thread that holds the GIL forever stops the watchdog's own thread too. As a last resort
    `faulthandler`, which does not need the GIL, then writes the stacks to stderr and ends the
    process with code 1, the only one it supports. It cannot tell a stopped process from a hung one,
    so it is armed only if stdin is not a terminal from which a user may suspend the process. Python
    has one such timer: the program must not use `faulthandler.dump_traceback_later` at the same
    time.

    `on_end` may be set to a function that is called with the phase just before the process ends, in
    the watchdog's thread; the process ends even if the function hangs.
    """

    def __init__(
        self, clock: PhaseClock, config: WatchdogConfig, report_dir: str | os.PathLike[str]
    ):
        self._clock, self._config = clock, config
        self._report = pathlib.Path(report_dir) / f"stacks-process{process_index()}.txt"
        self._index = process_index()
        limits = [limit for limit in dataclasses.asdict(config).values() if limit is not None]
        self._interval = min(1.0, min(limits, default=0.0) / 10)
        self._has_last_resort = not os.isatty(0)
        self._main = threading.main_thread()
        self.on_end: Callable[[Phase], None] = lambda phase: None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shardlib-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._interval:
            # Armed here, since the thread may never get to run.
            self._arm_last_resort(self._config.limit(self._clock.present[0]))
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        beat, stood_still = 0.0, 0.0
        last = time.monotonic()
        while not self._over.wait(self._interval):
            now = time.monotonic()
            late = now - last - self._interval
            last = now
            phase, seconds = self._clock.present
            if abs(now - seconds - beat) > self._interval / 2:  # There was progress.
                beat, stood_still = now - seconds, 0.0
            if late > self._interval:
                stood_still += late
            limit = self._config.limit(phase)
            self._arm_last_resort(None if limit is None else limit - (seconds - stood_still))
            if limit is None or seconds - stood_still <= limit:
                continue
            if _in_debugger(self._main):
                stood_still = seconds
                continue
            self._end(phase, seconds - stood_still, limit)

    def _arm_last_resort(self, left: float | None) -> None:
        if not self._has_last_resort:
            return
        if left is None:
            faulthandler.cancel_dump_traceback_later()
            return
        # Later than the watchdog thread would act if it could run.
        seconds = max(left, 0.0) + 10 * self._interval + 1.0
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def _end(self, phase: Phase, seconds: float, limit: float) -> None:
        # Writing may hang too, with the GIL (stderr is a pipe that nobody reads) or without (the
        # disk).
        with open(os.devnull, "w") as nowhere:
            faulthandler.dump_traceback_later(3 * _WRITING_SECONDS, exit=True, file=nowhere)
            threading.Thread(target=_exit_later, daemon=True).start()
            message = (
                f"process {self._index}: no progress in phase {phase!r} for {seconds:.0f} s "
                f"(its limit: {limit:g} s); stacks in {self._report}, exit code {HUNG}\n"
            )
            # Bypasses sys.stderr, whose lock a hung thread may hold.
            os.write(2, f"\n{message}".encode())
            faulthandler.dump_traceback(2, all_threads=True)
            try:
                self._report.parent.mkdir(parents=True, exist_ok=True)
                with open(self._report, "a") as report:
                    report.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}")
                    report.flush()
                    faulthandler.dump_traceback(report, all_threads=True)
            except OSError as error:
                os.write(2, f"stacks cannot be written to {self._report}: {error}\n".encode())
            with contextlib.suppress(Exception):  # The process ends for the hang in any case.
                self.on_end(phase)
            os._exit(HUNG)


def _exit_later() -> None:
    time.sleep(_WRITING_SECONDS)
    os._exit(HUNG)


def _in_debugger(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
