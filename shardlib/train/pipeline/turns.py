"""A schedule as arrays for a scan over ticks, one column per stage."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.train.pipeline.schedules import Schedule, Turns


class Turn(NamedTuple):
    """The turn of one stage in one tick, or in [ticks] ticks."""

    runs: jax.Array
    """Whether there is a turn. If not, the other fields are meaningless."""
    microbatch: jax.Array
    chunk: jax.Array
    """Index of the chunk on this stage."""
    slot: jax.Array
    """Slot that keeps the input of the chunk; meaningless for the first chunk."""
    place: jax.Array
    """Position of the chunk in the order in which a microbatch passes the chunks."""
    is_first: jax.Array
    """Whether it is the first chunk of the model."""
    is_last: jax.Array
    """Whether it is the last chunk of the model."""


class Tick(NamedTuple):
    """The forward and backward turn of a stage in a tick."""

    forward: Turn
    backward: Turn | None


def ticks(schedule: Schedule) -> Tick:
    """Returns the whole schedule, with leaves [ticks, stages]."""
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
