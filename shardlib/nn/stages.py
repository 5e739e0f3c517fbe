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

    @property
    def idle_share(self) -> float:
        """Fraction of the slots without a layer."""
        return 1 - self.num_layers / (self.places * self.slots)

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


def layer_faults(num_layers: int, stages: int, chunks: int = 1) -> list[str]:
    """Returns the faults of cutting layers into stages and chunks, each with its fix.

    Stages that store whole layers exchange whole chunks of them, so chunks must then be equal.
    """
    parts = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
    if num_layers < stages * chunks:
        return [
            f"{num_layers} layers do not fill {parts}.\n"
            f"  Use at least {stages * chunks} layers, or fewer stages or chunks."
        ]
    if num_layers % stages == 0 and num_layers % (stages * chunks):
        return [
            f"{num_layers} layers cannot be cut into {parts}: each stage stores "
            f"{num_layers // stages}.\n"
            f"  Use a number of layers that {stages * chunks} divides, or other stages or chunks."
        ]
    return []
