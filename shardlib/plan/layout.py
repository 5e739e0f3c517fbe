"""How a step is split over devices, and by what software it runs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
"""Mesh axes from the slowest interconnect to the fastest."""
_MANY_MICROBATCHES = 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes and how they are used."""

    stage: int = 1
    data: int = 1
    fsdp: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    slices: int = 1
    """How many slices `data` crosses first, and `fsdp` where `data` is too small."""
    microbatches: int = 1
    chunks: int = 1
    """Chunks of layers on a stage (interleaved schedule)."""
    sequence_parallel: bool = True
    """Whether `tensor` also cuts the residual stream. Source: Korthikanti et al. 2022, sec. 4.2."""
    zero: Literal[1, 2, 3] = 3
    """What `fsdp` cuts besides the optimizer state. Source: Rajbhandari et al. 2020, "ZeRO"."""
    shard_optimizer: bool = False
    """Whether `data` cuts the optimizer state (ZeRO 1) although parameters are whole."""
    offload_optimizer: bool = False
    """Whether the optimizer state waits in the memory of the hosts between updates."""
    stateless: bool = True
    """Whether the model keeps nothing but parameters: only then can replicas run a step apart."""

    @classmethod
    def of(cls, sizes: Mapping[str, int], slices: int = 1) -> "Layout":
        """Returns a layout of a mesh by the names of its axes."""
        degrees: dict[str, Any] = dict(sizes)
        return cls(**degrees, slices=slices)

    @property
    def num_devices(self) -> int:
        """Product of all degrees."""
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def batch_shards(self) -> int:
        """Devices among which the sequences of a batch are split."""
        return self.data * self.fsdp * self.expert

    @property
    def reduces_once(self) -> bool:
        """Whether replicas along `data` sum gradients once a step and not in each microbatch: where
        there are so many that it pays (see `plan.replicas`)."""
        return self.stateless and self.data > 1 and self.microbatches >= _MANY_MICROBATCHES

    def size(self, axis: str) -> int:
        """Devices along an axis."""
        return getattr(self, axis)

    def __str__(self) -> str:
        sizes = [f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return ",".join(sizes) or "data=1"


@dataclasses.dataclass(frozen=True)
class Software:
    """Properties of the program that runs the step."""

    attention: Literal["flash", "flash1", "unfused"] = "flash"
    """Fused attention never writes the scores to memory; before it, scores of all pairs were
    written and read. `flash1` are kernels as of Dao et al. 2022, "FlashAttention"; `flash` those
    after Dao 2023, "FlashAttention-2", which reach 1.7 times their rate (its section 4.1)."""
    fusion: Literal["compiled", "kernels", "eager"] = "compiled"
    """Whether elementwise operations are fused by a compiler, in part by kernels written for it, or
    each pass through memory."""
    overlap_tensor: bool = True
    """Whether matmuls are cut to hide collectives of `tensor` (Wang et al. 2023, "Overlap
    Communication with Dependent Computation via Decomposition")."""
    overlap_expert: bool = True
    """Whether tokens travel to experts beside other computation (DeepSeek-AI 2024, "DeepSeek-V3
    Technical Report", section 3.2.1)."""
    overlap_data: bool = True
    """Whether gradients are reduced during the backward pass."""
    overlap_gather: bool = True
    """Whether parameters of the next layer are gathered while one computes."""
    balance_head: bool = False
    """Whether the last pipeline stage holds fewer layers, for the head's sake."""
    single_rail: bool = False
    """Whether a collective over hosts uses one NIC of each and not all: parameters gathered one
    by one, as in ZeRO-3 of 2021 (Narayanan et al. 2021, section 5.2)."""
    skip_idle: bool = True
    """Whether a stage without a turn waits; else it computes what is then discarded."""
    keeps_traced: bool = False
    """Whether what the backward pass reads is what JAX traces: without rematerialisation every
    intermediate of norms (in float32) and of activations; and whether parameters have a copy in
    the width of the computation."""
    sums_each: bool = False
    """Whether sums over replicas are part of each microbatch; see `plan.replicas`."""
    whole_params: bool = False
    """Whether parameters that only ZeRO 3 would cut are whole between steps too, so that new ones
    are gathered once a step; else where they are used."""
    rerun_chunks: bool = False
    """Whether a pipeline keeps nothing but the inputs of chunks of layers and runs the chunks again
    before their backward pass, and holds embedding and head on every stage."""


SHARDLIB = Software(keeps_traced=True, sums_each=True, whole_params=True, rerun_chunks=True)
