"""Interface between the search and its workloads.

The search is independent of transformers. It tries layouts and choices and asks a `Workload`
whether they can run, what memory they take and how long they take. `plan.workloads.transformer`
answers from dims; a model of any other kind answers from its traced program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from shardlib.cost.costs import Memory, StepTime
from shardlib.cost.layout import Layout
from shardlib.hardware import Cluster
from shardlib.humanize import gib
from shardlib.nn.stages import StageCut, layer_faults

MomentDtype = Literal["float32", "bfloat16"]
_MOST_IDLE = 1 / 16
"""Largest share of idle slots of stages with unequally many layers: 126 layers on 16 stages leave
1.6%, 61 on 16 leave 4.7%. Other numbers of stages do better."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Decisions of a plan other than its mesh."""

    remat: str = "none"
    """A policy of `shardlib.nn.remat` for the first `layers` layers of each piece of the stack; the
    other layers keep everything."""
    layers: int | None = None
    """Layers of each piece that follow the policy; None for all."""
    moments: MomentDtype = "float32"
    """Dtype in which the optimizer stores its first moment."""
    loss_chunks: int = 1
    pieces: int = 1
    """Equal pieces of the stack that run as one program, as the chunks of all stages do."""

    def policy(self, num_layers: int) -> str:
        """Returns the remat policy in the syntax of `model.remat`."""
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
        """Returns the remat policy for reports, abbreviated if ranges repeat."""
        if self.pieces == 1 or self.policy(num_layers) in (self.remat, "none"):
            return self.policy(num_layers)
        return f"{self.remat} in {self.layers} of {num_layers // self.pieces}"

    @property
    def num_layers(self) -> int | None:
        """Layers of the whole stack that follow the policy; None for all."""
        return None if self.layers is None else self.layers * self.pieces


class Workload(Protocol):
    """One training step of one model on one batch."""

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
        """Unit of `tokens`: `tokens` or `images`."""
        ...

    @property
    def flops(self) -> float:
        """Model FLOPs of a step, for MFU; 0.0 if unknown."""
        ...

    def with_batch(self, batch: int) -> "Workload":
        """Returns the workload with another number of sequences or images per step."""
        ...

    def relaxed(self) -> "Workload":
        """Returns the workload with choices that change the numerics, such as moments in
        bfloat16."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that may follow different policies; 1 without layer ranges."""
        ...

    def degrees(self, axis: str, most: int) -> Sequence[int]:
        """Returns the degrees, up to `most`, that a mesh axis may have by itself; `(1,)` for an
        axis that the model does not use."""
        ...

    def variants(self, layout: Layout, cluster: Cluster) -> Sequence[Layout]:
        """Returns the ways to use the axes of a layout (`zero`, `sequence_parallel`) and the memory
        of a cluster's hosts (`offload_optimizer`)."""
        ...

    def faults(self, layout: Layout) -> list[str]:
        """Returns the reasons why a layout cannot run, as sentences; empty if it can."""
        ...

    def sums_once(self, layout: Layout) -> bool:
        """Returns whether a step sums gradients over `data` once by default."""
        ...

    def choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns the choices for a layout. A choice whose `layers` is not None stands for every
        number of layers up to it: the search takes the fewest that fit."""
        ...

    def lean_choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns choices of which one takes the least memory: if they do not fit, no other choice
        does."""
        ...

    def memory(self, layout: Layout, choice: Choice, cluster: Cluster) -> Memory:
        """Returns the memory of one device at the peak."""
        ...

    def time(self, layout: Layout, choice: Choice, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step."""
        ...

    def bound(self, layout: Layout, cluster: Cluster, most_microbatches: int) -> float:
        """Returns a lower bound of the seconds with any choice, and with any number of microbatches
        from the layout's to `most_microbatches`. Tight bounds make the search fast; 0.0 is
        valid."""
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
        """Device-seconds of a step."""
        return self.time.total * self.cluster.num_devices


PARTS = {
    "matmul": "matmuls",
    "attention": "attention",
    "elementwise": "passes over memory",
    "head": "logits and loss",
    "recompute": "recomputation",
    "optimizer": "optimizer",
    "tensor": "collectives over tensor",
    "context": "collectives over context",
    "expert": "collectives over expert",
    "fsdp": "collectives over fsdp",
    "offload": "offloading",
    "data": "gradient sums over data",
    "stage": "sends between stages",
    "bubble": "pipeline bubble",
    "imbalance": "uneven stages",
    "waiting": "waiting for the slowest",
}
"""Labels of the parts of `StepTime`; collectives count only their exposed time."""


def largest_parts(memory: Memory, number: int = 3) -> str:
    """Returns the largest parts of a device's memory, such as `optimizer 8.2 GiB, params 6.2
    GiB`."""
    parts = {name: size for name, size in vars(memory).items() if name != "host" and size}
    largest = sorted(parts, key=lambda name: -parts[name])[:number]
    return ", ".join(f"{name} {gib(parts[name])}" for name in largest)


def examples(workload: Workload) -> str:
    """Returns the unit of a batch: `sequences`, `images` or `examples`."""
    return "sequences" if workload.unit == "tokens" else workload.unit


def worth_cutting(num_layers: int, stages: int, chunks: int = 1) -> bool:
    """Returns whether layers can be cut into stages and chunks with few idle slots."""
    if layer_faults(num_layers, stages, chunks):
        return False
    return StageCut(num_layers, stages, chunks).idle_share <= _MOST_IDLE
