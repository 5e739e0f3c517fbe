"""The decision whether a failed group is started again."""

import dataclasses

from shardlib.runtime.exit_codes import DIVERGED, WRONG_REQUEST
from shardlib.runtime.launch.group import Ending
from shardlib.runtime.launch.progress import Progress

_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 30.0
_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class RestartDecision:
    """A decision: whether to start again, the delay, and the reason in one line."""

    again: bool
    reason: str
    backoff_seconds: float = 0.0


class Restarts:
    """Judges the failed attempts of one launch, in order.

    An attempt counts against the limit only if it saved no later step than earlier attempts, or
    than the step that the run went back to: a group that makes progress is started again as often
    as needed. A deterministic failure is not retried. Such failures are a wrong request, and the
    same kind of failure for the second time at the same step or, if it has no step, with nothing
    new saved in between. It allows a number of attempts in a row that gain nothing and are still
    followed by another.
    """

    def __init__(self, allowed: int):
        self._allowed = allowed
        self._in_vain = 0
        self._saved_step: int | None = None
        self._failures: set[tuple[str, int]] = set()

    def judge(self, ending: Ending, progress: Progress) -> RestartDecision:
        """Decides on a failed attempt."""
        gained = self._gained(progress)
        if forbidden := self._forbidden(ending, progress.failure):
            return RestartDecision(False, f"not started again: {forbidden}")
        self._in_vain = 0 if gained else self._in_vain + 1
        if self._in_vain > self._allowed:
            times = "1 attempt" if self._in_vain == 1 else f"{self._in_vain} attempts in a row"
            return RestartDecision(False, f"not started again: {times} saved nothing new")
        backoff = _FIRST_BACKOFF_SECONDS * 2 ** max(0, self._in_vain - 1)
        backoff = min(backoff, _LONGEST_BACKOFF_SECONDS)
        saved = f"nothing new was saved ({self._in_vain} of {self._allowed})"
        if gained:
            saved = f"step {progress.saved_step} is saved"
        return RestartDecision(
            True, f"starting again in {backoff:g} s: {ending.who}; {saved}", backoff
        )

    def _gained(self, progress: Progress) -> bool:
        saved, before = progress.saved_step, self._saved_step
        if before is not None and progress.rewound_to is not None:
            self._saved_step = before = min(before, progress.rewound_to)
        if saved is None or (before is not None and saved <= before):
            return False
        self._saved_step = saved
        return True

    def _forbidden(self, ending: Ending, failure: tuple[str, int | None] | None) -> str | None:
        """Returns a reason against another attempt that holds even after progress, or None."""
        if ending.cause or ending.code == _INTERRUPTED:
            return f"{ending.cause or 'Ctrl-C'} ended it"
        if ending.code == WRONG_REQUEST:
            return f"{ending.who}: the request is wrong"
        # The last saved step stands in for a failure without a step.
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
