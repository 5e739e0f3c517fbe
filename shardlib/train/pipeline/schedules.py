"""Pipeline schedules as tables of the turn of each stage in each tick.

A pipeline of S stages runs M microbatches in lockstep. Each stage holds v chunks of layers. Chunk c
of stage s is number `c * S + s` in the order in which a microbatch passes the chunks. In a tick a
stage runs at most one forward and one backward turn. Then all stages send activations to the next
chunk and gradients to the previous chunk.

| schedule      | chunks | kept inputs per stage | ticks               | bubble                |
|---------------|--------|-----------------------|---------------------|-----------------------|
| `gpipe`       | 1      | M                     | 2 (M + S - 1)       | (S - 1) / (M + S - 1) |
| `1f1b`        | 1      | at most 2 S - 3       | M + 2 (S - 1)       | (S - 1) / (M + S - 1) |
| `interleaved` | v      | at most (v + 1) S - 3 | v M + (v + 1) S - 2 | (S - 1) / (v M + S - 1) |

All three follow one rule. Every stage takes its turns in the same fixed order: groups of S
microbatches, and within a group chunk by chunk (backward: from the last chunk to the first). Turn j
of stage s runs forward in tick `s + j` and backward in tick `start + S - 1 - s + j`. The inputs of
a turn are therefore made exactly one tick before it, and nothing waits in between. `start` is
`v S - 1`, the tick in which the first microbatch has passed all chunks. For GPipe it is
`v M + S - 1`, when all microbatches have passed.

Source: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", sec. 2.2, for 1F1B, interleaving and the bubbles.
"""

import dataclasses
import heapq
from typing import NamedTuple, TypeAlias

import numpy as np

from shardlib.errors import ModelError, did_you_mean
from shardlib.nn.stages import StageCut, layer_faults

SCHEDULES = ("1f1b", "gpipe", "interleaved")

Placed: TypeAlias = "tuple[np.ndarray, np.ndarray]"
"""Microbatch and chunk of each turn, [ticks, stages]; -1 if idle."""


class Turns(NamedTuple):
    """The forward or backward turns of each stage in each tick, int32 [ticks, stages].

    An idle stage has -1 in all three fields.
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray
    """Slot that keeps the input of the chunk from its forward to its backward turn. -1 for the
    first chunk, whose input is recomputed."""

    @property
    def ticks(self) -> int:
        """Number of ticks in which any stage has a turn."""
        return int((self.microbatch >= 0).any(axis=1).sum())


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule for a number of stages, chunks and microbatches."""

    stages: int
    chunks: int
    microbatches: int
    forward: Turns
    backward: Turns | None
    """Backward turns, or None for a pass without gradients."""

    @property
    def num_slots(self) -> int:
        """Number of inputs that a stage keeps at a time."""
        return int(self.forward.slot.max()) + 1

    @property
    def turns(self) -> int:
        """Number of turns that one stage could take in the duration of the schedule.

        In each tick the stages wait for the slowest stage. A tick therefore lasts as long as a
        forward turn if any stage has one, plus a backward turn if any stage has one.
        """
        backward = 0 if self.backward is None else self.backward.ticks
        return self.forward.ticks + backward


def make_schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns a schedule by name.

    Args:
        name: One of `SCHEDULES`.
        stages: S, at least 1.
        microbatches: M.
        chunks: v, the chunks of layers on each stage.

    Raises:
        ModelError: If the schedule is invalid; the message lists all faults of `schedule_faults`.
    """
    faults = schedule_faults(name, stages=stages, microbatches=microbatches, chunks=chunks)
    if faults:
        raise ModelError("\n".join(faults))
    order = _order(stages, microbatches, chunks)
    start = chunks * microbatches + stages - 1 if name == "gpipe" else chunks * stages - 1
    ticks = start + chunks * microbatches + stages - 1
    last_first = np.stack([order[:, 0], chunks - 1 - order[:, 1]], axis=1)
    shifts = np.arange(stages)
    forward = _laid_out(order, shifts, ticks)
    backward = _laid_out(last_first, start + stages - 1 - shifts, ticks)
    slots = _slots(forward, backward)
    return Schedule(
        stages, chunks, microbatches, Turns(*forward, slots[0]), Turns(*backward, slots[1])
    )


def forward_schedule(*, stages: int, microbatches: int) -> Schedule:
    """Returns the schedule of a pass without gradients, in M + S - 1 ticks."""
    order = _order(stages, microbatches, 1)
    forward = _laid_out(order, np.arange(stages), microbatches + stages - 1)
    return Schedule(stages, 1, microbatches, Turns(*forward, np.full_like(forward[0], -1)), None)


def schedule_faults(
    name: str, *, stages: int, microbatches: int, chunks: int = 1, num_layers: int | None = None
) -> list[str]:
    """Returns the faults of a schedule, each with its fix, or an empty list."""
    if name not in SCHEDULES:
        return [
            f"no pipeline schedule is called {name!r}.{did_you_mean(name, SCHEDULES)}\n"
            f"  Choose one of: {', '.join(SCHEDULES)}."
        ]
    faults = []
    if chunks < 1 or (chunks > 1 and name != "interleaved"):
        faults.append(
            f"the schedule {name} was asked to run {chunks} chunks of layers on a stage.\n"
            "  Only interleaved cuts the layers of a stage into chunks; leave it at 1."
        )
    if name != "gpipe" and microbatches < stages:
        faults.append(
            f"{_count(microbatches)} not fill {stages} stages: the schedule {name} keeps "
            f"one in each.\n  Use at least microbatches={stages}, fewer stages, or gpipe."
        )
    if name == "interleaved" and microbatches % stages:
        faults.append(
            f"{microbatches} microbatches cannot be interleaved over {stages} stages, which take "
            f"them in groups of {stages}.\n  Use a multiple of {stages}, or the schedule 1f1b."
        )
    if num_layers is not None:
        faults += layer_faults(num_layers, stages, max(chunks, 1))
    return faults


def _count(microbatches: int) -> str:
    return "1 microbatch does" if microbatches == 1 else f"{microbatches} microbatches do"


def bubble_fraction(
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    num_layers: int | None = None,
    before: int = 0,
) -> float:
    """Returns the fraction of time that a stage is idle: (S - 1) / (v M + S - 1).

    It holds for every schedule here, whatever the durations of forward and backward turns. With
    `num_layers` the time of idle slots counts too, if the stages cannot divide the layers; `before`
    is the number of other layers that the first stage runs then.
    """
    turns = chunks * microbatches + stages - 1
    if num_layers is None:
        return (stages - 1) / turns
    loads = StageCut(num_layers, stages, chunks, before).loads
    return 1 - microbatches * sum(loads) / (stages * max(loads) * turns)


def _order(stages: int, microbatches: int, chunks: int) -> np.ndarray:
    """Returns the forward turns of a stage as (microbatch, chunk), [turns, 2]."""
    size = stages if chunks > 1 else microbatches
    groups = range(0, microbatches, size)
    turns = [(g + m, c) for g in groups for c in range(chunks) for m in range(size)]
    return np.array(turns, np.int32).reshape(-1, 2)


def _laid_out(order: np.ndarray, first_ticks: np.ndarray, ticks: int) -> Placed:
    """Returns microbatches and chunks of the turns in `order`, from each stage's first tick on."""
    turns = np.full((2, ticks, len(first_ticks)), -1, np.int32)
    for stage, first in enumerate(first_ticks):
        turns[:, first : first + len(order), stage] = order.T
    return turns[0], turns[1]


def _slots(forward: Placed, backward: Placed) -> tuple[np.ndarray, np.ndarray]:
    """Returns slots for the inputs of all turns except the first chunk's, lowest free slot
    first."""
    written, read = np.full_like(forward[0], -1), np.full_like(forward[0], -1)
    ticks, stages = written.shape
    for stage in range(stages):
        free, fresh = [], 0
        where: dict[tuple[int, int], int] = {}
        for tick in range(ticks):
            turn = (int(forward[0][tick, stage]), int(forward[1][tick, stage]))
            if turn[0] >= 0 and (stage, turn[1]) != (0, 0):
                if not free:
                    heapq.heappush(free, fresh)
                    fresh += 1
                where[turn] = written[tick, stage] = heapq.heappop(free)
            turn = (int(backward[0][tick, stage]), int(backward[1][tick, stage]))
            if turn in where:
                read[tick, stage] = where.pop(turn)
                heapq.heappush(free, int(read[tick, stage]))
    return written, read
