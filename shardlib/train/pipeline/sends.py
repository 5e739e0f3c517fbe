"""Sends between neighbouring stages, in each tick by the stages whose results are needed.

Collective-permutes have fixed pairs of devices. In a tick the program therefore takes one of
several permutes, one for each set of stages that send together; S stages have at most 2 S of
them. All devices take the same one, so nothing waits for idle stages.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from shardlib.train.pipeline.schedules import Schedule, Turns

AXIS = "stage"
Pairs = tuple[tuple[int, int], ...]
"""Stages (from, to)."""


class Sends(NamedTuple):
    """The sends of one direction in each tick of a schedule."""

    routes: tuple[Pairs, ...]
    """The distinct sets of pairs."""
    ticks: np.ndarray
    """Index of the route of each tick, int32 [ticks]."""

    @property
    def scope(self) -> str:
        """Name that says in a program in how many ticks each route is taken."""
        counts = np.bincount(self.ticks, minlength=len(self.routes))
        return f"branch_counts_{'_'.join(map(str, counts))}"


def sends(schedule: Schedule, turns: Turns, step: int) -> Sends:
    """Returns the sends to the next chunk (step 1) or to the previous chunk (step -1).

    The last chunk sends nothing forward and the first chunk nothing back.
    """
    place = turns.chunk * schedule.stages + np.arange(schedule.stages)
    end = schedule.chunks * schedule.stages - 1 if step == 1 else 0
    sending = (turns.microbatch >= 0) & (place != end)
    sets, ticks = np.unique(sending, axis=0, return_inverse=True)
    routes = (
        tuple((int(s), int(s + step) % schedule.stages) for s in np.flatnonzero(stages))
        for stages in sets
    )
    return Sends(tuple(routes), ticks.reshape(-1).astype(np.int32))


def send(tree: PyTree, sends: Sends, route: jax.Array) -> PyTree:
    """Returns what arrives from the neighbours, in a region that is manual over `stage`. The route
    of this tick is an int32 scalar, the same on all devices."""

    def along(pairs: Pairs) -> PyTree:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs) if pairs else x, tree)

    with jax.named_scope(sends.scope):
        branches = [lambda pairs=pairs: along(pairs) for pairs in sends.routes]
        return jax.lax.switch(route, branches)
