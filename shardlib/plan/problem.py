"""What the search asks of whatever is to be trained, and what it answers.

The search knows nothing of transformers: it tries layouts and choices and asks a `Workload` whether
they can be run, what they hold and how long they take. `plan.transformers` answers from dims; a
model of any other kind answers from its traced program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from shardlib.hardware import Cluster
from shardlib.plan.cost import StepTime
from shardlib.plan.layout import Layout
from shardlib.plan.memory import Memory

MomentDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a plan decides beside its mesh."""

    remat: str = "none"
    """A policy of `shardlib.remat`, of the first `layers` layers of each piece of the stack; the
    others keep everything."""
    layers: int | None = None
    """None for all."""
    moments: MomentDtype = "float32"
    """How the optimizer stores its first moment."""
    loss_chunks: int = 1
    pieces: int = 1
    """Equal pieces of the stack that are one program, as the chunks of all stages are."""

    def policy(self, num_layers: int) -> str:
        """Returns the rematerialisation as `model.remat` takes it."""
        piece = num_layers // self.pieces
        if self.layers is None or self.layers >= piece or self.remat == "none":
            return self.remat
        if self.layers == 0:
            return "none"
        ranges = []
        for first in range(0, num_layers, piece):
            end = first + self.layers
            last = first + piece - 1 if first + piece < num_layers else ""
            ranges += [f"{first}-{end - 1}:{self.remat}", f"{end}-{last}:none"]
        return ",".join(ranges)

    def summary(self, num_layers: int) -> str:
        """Returns the same for people, short where ranges repeat."""
        if self.pieces == 1 or self.policy(num_layers) in (self.remat, "none"):
            return self.policy(num_layers)
        return f"{self.remat} in {self.layers} of {num_layers // self.pieces}"

    @property
    def num_layers(self) -> int | None:
        """How many layers of the whole stack follow the policy; None for all."""
        return None if self.layers is None else self.layers * self.pieces


class Workload(Protocol):
    """What is trained: one step of one model on one batch."""

    @property
    def batch(self) -> int:
        """Sequences or images of a step, over all devices."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens of a step, or its images."""
        ...

    @property
    def unit(self) -> str:
        """What `tokens` counts: `tokens` or `images`."""
        ...

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, for MFU; 0.0 where they are not known."""
        ...

    def with_batch(self, batch: int) -> "Workload":
        """Returns the same with another number of sequences or images in a step."""
        ...

    def relaxed(self) -> "Workload":
        """Returns the same with choices that change the numbers, such as moments in bfloat16."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that may follow different policies; 1 where there are no such ranges."""
        ...

    def degrees(self, axis: str, most: int) -> Sequence[int]:
        """Returns the degrees, up to `most`, that a mesh axis may have by itself; `(1,)` for an
        axis that the model has no use for."""
        ...

    def variants(self, layout: Layout, cluster: Cluster) -> Sequence[Layout]:
        """Returns the ways to use the axes of a layout (`zero`, `sequence_parallel`) and the memory
        of a cluster's hosts (`offload_optimizer`)."""
        ...

    def faults(self, layout: Layout) -> list[str]:
        """Returns why a layout cannot be run, as sentences; empty when it can be."""
        ...

    def choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns what may be chosen on a layout. Those whose `layers` is not None stand for every
        number of layers up to that: the search takes the fewest that fit."""
        ...

    def leanest(self, layout: Layout, cluster: Cluster) -> Choice:
        """Returns the choice that holds least: where it does not fit, none does."""
        ...

    def memory(self, layout: Layout, choice: Choice, cluster: Cluster) -> Memory:
        """Returns what one device holds at the peak."""
        ...

    def time(self, layout: Layout, choice: Choice, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step."""
        ...

    def bound(self, layout: Layout, cluster: Cluster, most_microbatches: int) -> float:
        """Returns seconds below which no choice gets, with any number of microbatches from that
        of the layout to `most_microbatches`. Tight bounds make the search fast; 0.0 is valid."""
        ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """One way to run a step, with what it costs."""

    cluster: Cluster
    layout: Layout
    choice: Choice
    time: StepTime
    memory: Memory

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.total

    @property
    def device_seconds(self) -> float:
        """What a step occupies."""
        return self.time.total * self.cluster.num_devices
