"""Costs of a training step on one device: kernels, collectives and memory.

Two frontends emit `Costs`: `cost.transformer` from published dimensions and `cost.traced` from a
traced program. `cost.pricing` turns them into seconds on the links and rates of a cluster.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from shardlib.cost.machine.kernels import Kernel

Pass = Literal["forward", "recompute", "backward", "optimizer"]
"""Part of a step that an operation belongs to. `recompute` runs again, in the backward pass, what
the forward pass computed; `optimizer` is all that is not differentiated."""
Overlap = Literal["gather", "tensor", "expert", "data", "activations"]
"""Reason why a collective can overlap with computation: parameters of the next layer are gathered,
matmuls over `tensor` are decomposed, experts receive tokens, gradients are summed early, or other
work does not need the activations yet."""
Window = Literal["layers", "attention", "forward", "backward", "all forward", "all backward", "any"]
"""Computation of a microbatch that a collective overlaps with: of its layers, of a pass through its
layers, of a pass with the head, or as much as it needs. `backward` includes the recomputation."""


def pass_of(name: str, default: Pass = "optimizer") -> Pass:
    """Returns the pass of an operation from the JAX name that its transformations gave it, such as
    `jit(step)/transpose(jvp())/while/body/dot_general`; `default` without a transformation."""
    if "rematted_computation" in name:
        return "recompute"
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else default


def undifferentiated(names: Iterable[str]) -> Pass:
    """Returns the pass of a program's operations without a transformation, given the JAX names of
    all its operations: `optimizer` if the program takes gradients, else `forward`."""
    return "optimizer" if any("jvp(" in name for name in names) else "forward"


class Work(NamedTuple):
    """A kernel that runs `count` times."""

    during: Pass
    part: str
    """Part of `StepTime` that it counts for, unless it is recomputation or the optimizer's."""
    kernel: Kernel
    count: float = 1.0


class CollectiveCost(NamedTuple):
    """A collective, or a transfer to the host or to the next stage, that runs `count` times."""

    part: str
    """Part of `StepTime` that it counts for."""
    kind: str
    """A kind of `fabric.Link.seconds`."""
    axes: tuple[str, ...]
    """Mesh axes that it runs over as if they were one, or `host`."""
    num_bytes: float
    """Bytes of the array that is gathered or summed, per group of devices."""
    pieces: float = 1.0
    """Arrays that travel one after the other."""
    count: float = 1.0
    overlap: Overlap | None = None
    window: Window = "any"


@dataclasses.dataclass
class Costs:
    """Costs of one microbatch on one device, and of the step around the microbatches."""

    work: list[Work] = dataclasses.field(default_factory=list)
    collectives: list[CollectiveCost] = dataclasses.field(default_factory=list)
    work_once: list[Work] = dataclasses.field(default_factory=list)
    """Kernels that run once a step."""
    collectives_once: list[CollectiveCost] = dataclasses.field(default_factory=list)
    num_layers: int = 1
    """Layers that are divided among pipeline stages."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the busiest device; the parts add up to `total`."""

    matmul: float = 0.0
    """Weight matmuls of the layers, forward and backward."""
    attention: float = 0.0
    elementwise: float = 0.0
    """Norms, activations, residual sums: passes over memory."""
    head: float = 0.0
    """Logits and loss."""
    recompute: float = 0.0
    """Recomputation in the backward pass."""
    optimizer: float = 0.0
    tensor: float = 0.0
    """Exposed collectives over `tensor`; the other mesh axes have the same meaning."""
    context: float = 0.0
    expert: float = 0.0
    fsdp: float = 0.0
    offload: float = 0.0
    """Transfers of activations and optimizer state to the host and back."""
    data: float = 0.0
    stage: float = 0.0
    bubble: float = 0.0
    """Idle time of pipeline stages."""
    imbalance: float = 0.0
    """Time that stages wait for the stage with the head or with more layers."""
    waiting: float = 0.0
    """Time that devices wait for the slowest host."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return dict(vars(self))

    @property
    def bottleneck(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=self.parts.__getitem__)


RUNTIME_BYTES = {"tpu": 0.5e9, "gpu": 2.0e9, "cpu": 0.0}
"""Bytes of program, library contexts and buffers of collectives, by platform."""
_FRAGMENTATION = 0.04
"""Fraction of the memory that allocators cannot use. Together with the runtime it leaves 4 to 7% of
what a program may use. That is more than the peak of any program of `benchmarks/plan_memory.py`
exceeds the prediction for its kind of chip (3.5% on TPUs, 5.6% on GPUs)."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes at the peak on the device that holds most; they add up to `total`.

    The peak is either in the head or in the backward pass of a layer. In the head all activations
    and the logits are alive. In the backward pass the gradients are alive, and one layer is
    recomputed and gathered.
    """

    params: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    """Activations kept from the forward pass for the backward pass."""
    recomputed: float = 0.0
    """Activations that one layer recomputes before its backward pass and holds during it."""
    gathered: float = 0.0
    """Gathered parameters of the layers in use, and their gradients before they are scattered."""
    logits: float = 0.0
    runtime: float = 0.0
    host: float = 0.0
    """Offloaded activations and optimizer state in host memory; not part of `total`."""

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return _total(vars(self))

    def fits(self, capacity_bytes: float) -> bool:
        """Returns whether it fits a device, with the memory that allocators cannot use."""
        return self.over(capacity_bytes) <= 0

    def over(self, capacity_bytes: float) -> float:
        """Returns the bytes by which it exceeds the usable memory of a device; negative if it
        fits."""
        return self.total - usable(capacity_bytes)


def usable(capacity_bytes: float) -> float:
    """Returns the bytes of a device's memory that allocators can use."""
    return capacity_bytes * (1 - _FRAGMENTATION)


def peak(throughout: Mapping[str, float], phases: Iterable[Mapping[str, float]]) -> Memory:
    """Returns the memory in the phase of a step that holds most. `throughout` are bytes by category
    of `Memory`; each phase has the categories of which it holds another number."""
    return Memory(**max(({**throughout, **phase} for phase in phases), key=_total))


def _total(held: Mapping[str, float]) -> float:
    return sum(held.values()) - held.get("host", 0.0)
