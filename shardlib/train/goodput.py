"""The account of a run: where the wall time of all its attempts went, and how much of it counts.

Wall time is divided by what the host does, since that is what a run waits for. Each second belongs
to one share:

    init, compile, data_wait, step, evaluate, save, restore
                phases of `shardlib.phases`. `compile` ends when the metrics of the first step of
                an attempt have arrived. `data_wait` is waiting for a batch while no step is in
                flight, so that the devices have nothing to do: while one is, what the host waits
                for is the step, and time to prepare batches that the devices' work hides is none.
    lost        what was `step`, `data_wait` or `evaluate` of steps that do not count: a kill or a
                crash undid them, or a rewind. Other shares are never moved: a compilation is one
                whatever becomes of the steps after it.
    idle        from the last thing that an attempt wrote down (a row or an event) to the start of
                the next attempt; so what a killed process did since its last row is in here too.
                Nothing was waited for after an attempt that had taken all steps: a run that is
                given more of them later on goes on as if at once.

Shares add up to the time since the first attempt began, which is when its `PhaseClock` says (for
`shardlib train`, when the process was started), but for that.
Goodput is `step` over the sum of all.

Each row of metrics.jsonl and each event holds the account so far, so that a kill loses none of it:
the next attempt takes over from the last of them.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from shardlib.phases import PHASES, Phase, PhaseClock
from shardlib.train import humanize

SHARES: tuple[str, ...] = (*PHASES, "lost", "idle")
_WORK: tuple[Phase, ...] = ("step", "data_wait", "evaluate")


class Account:
    """Divides the wall time of a run over all of its attempts, of which this is the latest.

    Args:
        clock: The clock of this attempt, which began when it was made.
        now: Unix time in seconds.
    """

    def __init__(self, clock: PhaseClock, *, now: Callable[[], float] = time.time):
        self._clock, self._now = clock, now
        # Of earlier attempts; and less than nothing where time of this one was moved to `lost`.
        self._carried = dict.fromkeys(SHARES, 0.0)

    def resume(self, kept: Mapping[str, Any] | None, last: Mapping[str, Any] | None) -> None:
        """Takes over the account of the attempts before, at the start of this one.

        Args:
            kept: The row of the step that the run goes on from, None for the start.
            last: The last thing that was written, a row or an event, with `finished` if the run had
                taken all of its steps. Without `time` and `spent`, as in rows of old, the account
                begins with this attempt.
        """
        if last is None or "spent" not in last:
            return
        started = self._now() - sum(self._clock.seconds().values())
        self._carried = _shares(last)
        if not last.get("finished"):
            # Not negative where another host, or a clock put right, says that it is earlier.
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
        """Returns what a later attempt needs to go on: `time` (Unix) and `spent`, without zeros."""
        spent = {
            share: seconds
            for share, exact in self.seconds().items()
            if (seconds := round(exact, 3)) > 0
        }
        return {"time": round(self._now(), 3), "spent": spent}


def goodput(seconds: Mapping[str, float]) -> float:
    """Returns the part of the wall time, in [0, 1], that went into steps which count."""
    return seconds.get("step", 0.0) / (sum(seconds.values()) or 1.0)


def summary(seconds: Mapping[str, float]) -> str:
    """Returns an account as a line: `91 % of 12:00: compile 4 %, data wait 2 %, lost 2 %`.

    What is below half a percent is left out.
    """
    wall = sum(seconds.values())
    shown = [
        f"{share.replace('_', ' ')} {percent} %"
        for share in SHARES
        if share != "step" and (percent := round(100 * seconds.get(share, 0.0) / (wall or 1.0)))
    ]
    text = f"{100 * goodput(seconds):.0f} % of {humanize.duration(wall)}"
    return f"{text}: {', '.join(shown)}" if shown else text


def _shares(written: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns the account that a row or an event holds; nothing where it holds none."""
    spent = (written or {}).get("spent", {})
    return {share: float(spent.get(share, 0.0)) for share in SHARES}
