"""What a process is doing, and for how long: read by the watchdog and by the account of time."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal, get_args

Phase = Literal["init", "compile", "data_wait", "step", "evaluate", "save", "restore"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseClock:
    """Says which phase the one thread that drives it is in; other threads may look on.

    Begins in `init`. Each second belongs to exactly one phase: the innermost that is open.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._spent: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        self._since = clock()
        # Replaced as one, so that another thread never sees a phase with the beat of another.
        self._present: tuple[Phase, float] = ("init", self._since)

    @property
    def present(self) -> tuple[Phase, float]:
        """The phase now, and the seconds since it began or last made progress."""
        phase, beat = self._present
        return phase, self._clock() - beat

    def progress(self) -> None:
        """Says that the phase goes on as it should, such as after each step."""
        self._present = self._present[0], self._clock()

    def enter(self, phase: Phase) -> None:
        """Ends the present phase and begins another."""
        now = self._clock()
        self._spent[self._present[0]] += now - self._since
        self._since = now
        self._present = phase, now

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Goes through a phase, and back to the one before."""
        before = self._present[0]
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[Phase, float]:
        """Returns the seconds spent in each phase so far; together, since this clock was made."""
        now = self._clock()
        spent = dict(self._spent)
        spent[self._present[0]] += now - self._since
        return spent
