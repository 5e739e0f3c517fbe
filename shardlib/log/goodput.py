"""The account of a run: the wall time of all its attempts by share, and its goodput.

Wall time is divided by the activity of the host, because the run waits for the host. Each second
belongs to one share:

    init, compile, data_wait, step, evaluate, save, restore
                phases of `shardlib.runtime.phases`. `compile` ends when the metrics of the first
                step of an attempt have arrived. `data_wait` is the wait for a batch while no step
                is in flight, so the devices are idle. While a step is in flight the host waits for
                the step, and batch preparation hidden by the devices' work does not count.
    lost        `step`, `data_wait` and `evaluate` of steps that do not count, because a kill, a
                crash or a rewind undid them. Other shares are never moved: a compilation counts
                even if its steps are lost.
    idle        from the last write of an attempt (a row or an event) to the start of the next
                attempt. It includes the work of a killed process since its last row. It excludes
                the time after an attempt that completed all steps: a run that is extended later
                continues as if at once.

With this exception, the shares add up to the time since the first attempt began. Its `PhaseClock`
sets that start; for `shardlib train` it is the start of the process.
Goodput is `step` over the sum of all shares.

Each row of metrics.jsonl and each event holds the account so far, so a kill loses none of it: the
next attempt continues from the last row or event.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from shardlib import humanize
from shardlib.runtime.phases import PHASES, Phase, PhaseClock

SHARES: tuple[str, ...] = (*PHASES, "lost", "idle")
_WORK: tuple[Phase, ...] = ("step", "data_wait", "evaluate")


class Account:
    """The account of the wall time of a run over all of its attempts, updated by the latest one.
    The clock starts with the attempt; `now` returns the Unix time in seconds."""

    def __init__(self, clock: PhaseClock, *, now: Callable[[], float] = time.time):
        self._clock, self._now = clock, now
        # Seconds of earlier attempts. Negative where time of this attempt was moved to `lost`.
        self._carried = dict.fromkeys(SHARES, 0.0)

    def resume(self, kept: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> None:
        """Continues the account of the previous attempts, at the start of this one.

        Args:
            kept: The row of the step that the run resumes from; None for the start.
            last: The last row or event written, with `finished` if the run had completed all of
                its steps. Without `time` and `spent`, as in old rows, the account begins with this
                attempt.
        """
        if last is None or "spent" not in last:
            return
        started = self._now() - sum(self._clock.seconds().values())
        self._carried = _shares(last)
        if not last.get("finished"):
            # Another host or an adjusted clock may give an earlier time.
            self._carried["idle"] += max(0.0, started - last["time"])
        self.rewound(kept)

    def rewound(self, kept: Mapping[str, Any] | None) -> None:
        """Moves the work of all steps after a row to `lost`; None is the start of the run."""
        before, present = _shares(kept), self.seconds()
        for share in _WORK:
            lost = max(0.0, present[share] - before[share])
            self._carried[share] -= lost
            self._carried["lost"] += lost

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each share."""
        shares = dict(self._carried)
        for phase, seconds in self._clock.seconds().items():
            shares[phase] += seconds
        return shares

    def stamp(self) -> dict[str, Any]:
        """Returns the entries that a later attempt resumes from: `time` (Unix) and `spent`.

        `spent` omits zeros.
        """
        spent = {
            share: seconds
            for share, exact in self.seconds().items()
            if (seconds := round(exact, 3)) > 0
        }
        return {"time": round(self._now(), 3), "spent": spent}


def goodput(seconds: Mapping[str, float]) -> float:
    """Returns the fraction of the wall time, in [0, 1], spent on steps that count."""
    return seconds.get("step", 0.0) / (sum(seconds.values()) or 1.0)


def summary(seconds: Mapping[str, float]) -> str:
    """Returns an account as a line: `91 % of 12:00: compile 4 %, data wait 2 %, lost 2 %`.

    Shares that round to 0 % are omitted.
    """
    wall = sum(seconds.values())
    shown = [
        f"{share.replace('_', ' ')} {percent} %"
        for share in SHARES
        if share != "step" and (percent := round(100 * seconds.get(share, 0.0) / (wall or 1.0)))
    ]
    text = f"{100 * goodput(seconds):.0f} % of {humanize.clock(wall)}"
    return f"{text}: {', '.join(shown)}" if shown else text


def _shares(written: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the account in a row or an event, with zeros for missing shares."""
    spent = (written or {}).get("spent", {})
    return {share: float(spent.get(share, 0.0)) for share in SHARES}
