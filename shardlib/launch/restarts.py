"""Whether a group that failed is started again."""

import dataclasses

from shardlib.exit_codes import DIVERGED, WRONG_REQUEST
from shardlib.launch.group import Ending
from shardlib.launch.progress import Progress

_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 30.0
_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether to start again, after how long, and why in one line."""

    again: bool
    reason: str
    backoff_seconds: float = 0.0


class Restarts:
    """Judges the failed attempts of one launch, in order.

    Only attempts that saved no later step than those before them are counted, or than the step that
    the run went back to: a group that gets on is started again as often as it takes. What would
    fail again at the same place is not tried again: a wrong request, and the same kind of failure
    for the second time at the same step, or, if it has none, with nothing new saved in between.

    Args:
        allowed: How many attempts in a row may gain nothing and still be followed by another.
    """

    def __init__(self, allowed: int):
        self._allowed = allowed
        self._in_vain = 0
        self._saved_step: int | None = None
        self._failures: set[tuple[str, int]] = set()

    def judge(self, ending: Ending, progress: Progress) -> Verdict:
        """Decides about an attempt that has failed.

        Args:
            ending: How it ended.
            progress: The latest step that any process has saved, and the failure reported.
        """
        gained = self._gained(progress)
        if forbidden := self._forbidden(ending, progress.failure):
            return Verdict(False, f"not started again: {forbidden}")
        self._in_vain = 0 if gained else self._in_vain + 1
        if self._in_vain > self._allowed:
            times = "1 attempt" if self._in_vain == 1 else f"{self._in_vain} attempts in a row"
            return Verdict(False, f"not started again: {times} saved nothing new")
        backoff = _FIRST_BACKOFF_SECONDS * 2 ** max(0, self._in_vain - 1)
        backoff = min(backoff, _LONGEST_BACKOFF_SECONDS)
        saved = f"nothing new was saved ({self._in_vain} of {self._allowed})"
        if gained:
            saved = f"step {progress.saved_step} is saved"
        return Verdict(True, f"starting again in {backoff:g} s: {ending.who}; {saved}", backoff)

    def _gained(self, progress: Progress) -> bool:
        saved, before = progress.saved_step, self._saved_step
        if before is not None and progress.rewound_to is not None:
            self._saved_step = before = min(before, progress.rewound_to)
        if saved is None or (before is not None and saved <= before):
            return False
        self._saved_step = saved
        return True

    def _forbidden(self, ending: Ending, failure: tuple[str, int | None] | None) -> str | None:
        """What speaks against another attempt, whatever was gained."""
        if ending.asked or ending.code == _INTERRUPTED:
            return f"{ending.asked or 'Ctrl-C'} ended it"
        if ending.code == WRONG_REQUEST:
            return f"{ending.who}: what was asked for is wrong"
        # Where it has not said where: after what is saved, as far as is known.
        saved_step = self._saved_step or 0
        if failure is None and ending.code == DIVERGED:
            failure = ("diverged", saved_step)
        if failure is None:
            return None
        kind, step = failure
        place = (kind, saved_step if step is None else step)
        if place in self._failures:
            return f"{kind}{',' if step is None else f' at step {step}'} for the second time"
        self._failures.add(place)
        return None
