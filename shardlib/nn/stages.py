"""The cut of a stack of layers into the stages of a pipeline, for any number of layers.

Each stage has equally many slots for layers, so that all stages run one program. If the number of
layers does not fill the slots, some chunks hold a layer less: the last first, which computes the
head as well, then the first, which computes the embedding, and then the next ones. 126 layers on 8
stages are cut into 15, 16, 16, 16, 16, 16, 16 and 15.
"""

import dataclasses
import functools
import itertools


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

    @property
    def places(self) -> int:
        """Number of chunks on all stages, S v."""
        return self.stages * self.chunks

    @property
    def slots(self) -> int:
        """Slots for layers in each chunk; every chunk fills all of them or all but the last."""
        return -(-self.num_layers // self.places)

    @property
    def is_even(self) -> bool:
        """Whether every chunk fills its slots."""
        return self.num_layers % self.places == 0

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Layers of each chunk, by place."""
        idle = self.places * self.slots - self.num_layers
        lighter = {*[self.places - 1][:idle], *range(idle - 1)}
        return tuple(self.slots - (place in lighter) for place in range(self.places))

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        """First layer of each chunk, by place."""
        return tuple(itertools.accumulate(self.counts[:-1], initial=0))

    @property
    def by_stage(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(sum(self.counts[stage :: self.stages]) for stage in range(self.stages))
