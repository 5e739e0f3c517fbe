"""A schedule as arrays that a scan over ticks reads, each stage its own column."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.pipeline.schedules import Schedule, Turns


class Turn(NamedTuple):
    """One stage's turn in one tick, or [ticks] of them."""

    runs: jax.Array
    """Whether there is a turn; without one the rest means nothing."""
    microbatch: jax.Array
    chunk: jax.Array
    """Chunk of this stage."""
    slot: jax.Array
    """Where the chunk's input is kept; what the first chunk says means nothing."""
    place: jax.Array
    """Number of the chunk in the order in which a microbatch passes them."""
    is_first: jax.Array
    """Whether it is the first chunk of all."""
    is_last: jax.Array
    """Whether it is the last chunk of all."""


class Tick(NamedTuple):
    """What a stage does in a tick."""

    forward: Turn
    backward: Turn | None


def ticks(schedule: Schedule) -> Tick:
    """Returns the whole schedule, leaves [ticks, stages]."""
    backward = schedule.backward
    return Tick(
        _turns(schedule, schedule.forward), None if backward is None else _turns(schedule, backward)
    )


def _turns(schedule: Schedule, turns: Turns) -> Turn:
    place = turns.chunk * schedule.stages + np.arange(schedule.stages, dtype=np.int32)[None]
    runs = turns.microbatch >= 0
    numbers = (np.maximum(x, 0) for x in (turns.microbatch, turns.chunk, turns.slot))
    is_last = place == schedule.chunks * schedule.stages - 1
    return Turn(*map(jnp.asarray, (runs, *numbers, place, place == 0, is_last)))
