"""A clock of the phases of a process, read by the watchdog and by the account of time."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

Phase = Literal["init", "compile", "data_wait", "step", "evaluate", "save", "restore"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def process_age_seconds() -> float:
    """Returns the seconds since this process was started; 0 if the system does not report it.

    The time before an `exec` of this program counts.

    Source: proc_pid_stat(5), of which `starttime` is the 22nd field.
    """
    try:
        after_name = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2]
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (OSError, AttributeError):
        return 0.0
    ticks = int(after_name.split()[19])
    return max(0.0, since_boot - ticks / os.sysconf("SC_CLK_TCK"))


class _State(NamedTuple):
    """The state of a clock, replaced as a whole so that other threads read consistent values."""

    phase: Phase
    since: float
    """Start time of the phase."""
    beat: float
    """Time of its last progress."""
    spent: dict[Phase, float]
    """Seconds in each phase until `since`; never changed in place."""


class PhaseClock:
    """A clock of the phase that its one driving thread is in; other threads may read it.

    It begins in `init`. Each second belongs to exactly one phase: the innermost open one. `clock`
    returns monotonic seconds; `init` has already lasted `age_seconds`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, age_seconds: float = 0.0):
        self._clock = clock
        now = clock()
        # Time before this point cannot hang, so it does not count towards a limit.
        self._state = _State("init", now - age_seconds, now, dict.fromkeys(PHASES, 0.0))

    @property
    def present(self) -> tuple[Phase, float]:
        """The current phase, and the seconds since it began or last made progress."""
        state = self._state
        return state.phase, self._clock() - state.beat

    def progress(self) -> None:
        """Marks progress within the phase, such as after each step."""
        self._state = self._state._replace(beat=self._clock())

    def enter(self, phase: Phase) -> None:
        """Ends the current phase and begins another."""
        now = self._clock()
        self._state = _State(phase, now, now, self._spent_until(now, self._state))

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Enters a phase for the context, then returns to the previous one."""
        before = self._state.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[Phase, float]:
        """Returns the seconds spent in each phase so far, which add up to the clock's age."""
        state = self._state  # Read before the time, so that the time is not before `since`.
        return self._spent_until(self._clock(), state)

    @staticmethod
    def _spent_until(now: float, state: _State) -> dict[Phase, float]:
        spent = state.spent.copy()
        spent[state.phase] += now - state.since
        return spent
