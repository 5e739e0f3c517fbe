"""What a process is doing, and for how long: read by the watchdog and by the account of time."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

Phase = Literal["init", "compile", "data_wait", "step", "evaluate", "save", "restore"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def process_age_seconds() -> float:
    """Returns how long ago this process was started; 0 where the system does not tell.

    What it was before it became this program (`exec`) counts.

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
    """All that a clock knows: replaced as one, so that other threads see what belongs together."""

    phase: Phase
    since: float
    """When the phase began."""
    beat: float
    """When it last made progress."""
    spent: dict[Phase, float]
    """Seconds in each phase until `since`; never changed in place."""


class PhaseClock:
    """Says which phase the one thread that drives it is in; other threads may look on.

    Begins in `init`. Each second belongs to exactly one phase: the innermost that is open.

    Args:
        clock: Monotonic seconds.
        age_seconds: How long `init` had lasted before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, age_seconds: float = 0.0):
        self._clock = clock
        now = clock()
        # Nothing of what was before can hang any more.
        self._state = _State("init", now - age_seconds, now, dict.fromkeys(PHASES, 0.0))

    @property
    def present(self) -> tuple[Phase, float]:
        """The phase now, and the seconds since it began or last made progress."""
        state = self._state
        return state.phase, self._clock() - state.beat

    def progress(self) -> None:
        """Says that the phase goes on as it should, such as after each step."""
        self._state = self._state._replace(beat=self._clock())

    def enter(self, phase: Phase) -> None:
        """Ends the present phase and begins another."""
        now = self._clock()
        self._state = _State(phase, now, now, self._spent_until(now, self._state))

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Goes through a phase, and back to the one before."""
        before = self._state.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[Phase, float]:
        """Returns the seconds spent in each phase so far; together, since this clock was made."""
        state = self._state  # Before the time is read, which is then no earlier than `since`.
        return self._spent_until(self._clock(), state)

    @staticmethod
    def _spent_until(now: float, state: _State) -> dict[Phase, float]:
        spent = state.spent.copy()
        spent[state.phase] += now - state.since
        return spent
