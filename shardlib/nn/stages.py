"""The cut of a stack of layers into the stages of a pipeline, for any number of layers.

Each stage has equally many slots for layers, so that all stages run one program. If the number of
layers does not fill the slots, some chunks hold a layer less: the last first, which computes the
head as well, then the first, which computes the embedding, and then the next ones. 126 layers on 8
stages are cut into 15, 16, 16, 16, 16, 16, 16 and 15. The first chunk holds still fewer if it runs
other layers before.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable

from shardlib.sharding.partition import Placement

_BEFORE = "dense_layers"
"""Logical axis of other layers that the first stage runs before those that are cut."""


@dataclasses.dataclass(frozen=True)
class StageCut:
    """The layers of each chunk of a pipeline of S stages with v chunks each.

    A *place* is the position of a chunk in the order in which a microbatch passes the chunks: chunk
    c of stage s has place `c * S + s`.
    """

    num_layers: int
    """L, at least S v."""
    stages: int
    chunks: int = 1
    before: int = 0
    """Other layers that the first stage runs before. They count if the cut is uneven."""

    @property
    def places(self) -> int:
        """Number of chunks on all stages, S v."""
        return self.stages * self.chunks

    @property
    def slots(self) -> int:
        """Slots for layers in each chunk."""
        return max(self.counts) if self.before else -(-self.num_layers // self.places)

    @property
    def is_even(self) -> bool:
        """Whether every chunk fills its slots."""
        return self.num_layers % self.places == 0

    @property
    def idle_share(self) -> float:
        """Fraction of the slots without a layer."""
        return 1 - self.num_layers / (self.places * self.slots)

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each chunk, by place."""
        if self.is_even:
            return (self.num_layers // self.places,) * self.places
        return _counts(self.num_layers, self.places, self.before)

    @property
    def loads(self) -> tuple[int, ...]:
        """Layers that each chunk runs, by place, with those before in an uneven cut."""
        first, *others = self.counts
        return (first if self.is_even else first + self.before, *others)

    @property
    def firsts(self) -> tuple[int, ...]:
        """First layer of each chunk, by place."""
        return tuple(itertools.accumulate(self.counts[:-1], initial=0))

    @property
    def by_stage(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(sum(self.counts[stage :: self.stages]) for stage in range(self.stages))


@functools.lru_cache(1024)
def _counts(num_layers: int, places: int, before: int) -> tuple[int, ...]:
    """Gives each place a layer, and then each further layer to the place with the fewest."""
    counts = [1] * places

    def weight(place: int) -> tuple[int, bool, int]:
        return counts[place] + (0 if place else before), place == places - 1, -place

    for _ in range(num_layers - places):
        counts[min(range(places), key=weight)] += 1
    return tuple(counts)


def layers_before(placements: Iterable[Placement]) -> int:
    """Returns the number of layers, by the placements of a model's variables, that the first stage
    runs before those that are cut: the dense layers of a model with experts."""
    axes = ((p.logical_axes or (None,), p.shape) for p in placements)
    return max((shape[0] for names, shape in axes if names[:1] == (_BEFORE,)), default=0)


def layer_faults(num_layers: int, stages: int, chunks: int = 1) -> list[str]:
    """Returns the faults of cutting layers into stages and chunks, each with its fix.

    Stages that store whole layers exchange whole chunks of them, so chunks must then be equal.
    """
    parts = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
    if num_layers < stages * chunks:
        return [
            f"{parts} need {stages * chunks} layers, and the model has {num_layers}.\n"
            f"  Use at least {stages * chunks} layers, or fewer stages or chunks."
        ]
    if num_layers % stages == 0 and num_layers % (stages * chunks):
        return [
            f"{num_layers} layers cannot be cut into {parts}: each stage stores "
            f"{num_layers // stages}.\n"
            f"  Use a number of layers that {stages * chunks} divides, or other stages or chunks."
        ]
    return []
