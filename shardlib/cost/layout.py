"""Layout of a step over devices, and the software that runs it."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

from shardlib.sharding.manual import NESTS_IN_MESH_ORDER_ONLY

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
    """Slices that the mesh crosses: along `data` first, then along `fsdp` where `data` is too
    small."""
    microbatches: int = 1
    chunks: int = 1
    """Chunks of layers on a stage (interleaved schedule)."""
    sequence_parallel: bool = True
    """Whether `tensor` also shards the residual stream (Korthikanti et al. 2022, sec. 4.2)."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage: the state that `fsdp` shards in addition to the optimizer state. Source:
    Rajbhandari et al. 2020, "ZeRO"."""
    shard_optimizer: bool = False
    """Whether `data` shards the optimizer state (ZeRO 1) although parameters are replicated."""
    offload_optimizer: bool = False
    """Whether the optimizer state is offloaded to host memory between updates."""
    stateless: bool = True
    """Whether the model has no state other than parameters. Replicas can run a step apart only
    then."""

    @classmethod
    def of(cls, sizes: Mapping[str, int], slices: int = 1) -> "Layout":
        """Returns the layout of a mesh from the sizes of its axes by name."""
        degrees: dict[str, Any] = dict(sizes)
        return cls(**degrees, slices=slices)

    @property
    def num_devices(self) -> int:
        """Product of all degrees."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Degrees in the order of `AXES`."""
        return tuple(self.size(axis) for axis in AXES)

    @property
    def batch_shards(self) -> int:
        """Devices among which the sequences of a batch are split."""
        return self.data * self.fsdp * self.expert

    @property
    def reduces_once(self) -> bool:
        """Whether replicas along `data` sum gradients once a step and not in each microbatch. It
        pays with enough microbatches (see `cost.transformer.communication.replica_sums`)."""
        return self.stateless and self.data > 1 and self.microbatches >= _MANY_MICROBATCHES

    @property
    def sums_context_once(self) -> bool:
        """Whether groups along `context` can sum gradients once a step: where this jax compiles
        regions over the axes before it within one over `context`."""
        return not NESTS_IN_MESH_ORDER_ONLY or self.stage == self.fsdp == self.expert == 1

    @property
    def kept_inputs(self) -> int:
        """Inputs of chunks that a stage of shardlib keeps; see
        `shardlib.train.pipeline.schedules`."""
        if self.stage == 1:
            return 0
        if self.microbatches < self.stage:
            return self.microbatches
        most = 2 * self.stage - 3 if self.chunks == 1 else (self.chunks + 1) * self.stage - 3
        return min(self.chunks * self.microbatches, max(most, 1))

    def size(self, axis: str) -> int:
        """Devices along an axis."""
        return getattr(self, axis)

    def __str__(self) -> str:
        sizes = [f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return ",".join(sizes) or "data=1"


@dataclasses.dataclass(frozen=True)
class Software:
    """Properties of the program that runs the step."""

    attention: Literal["flash", "flash1", "cudnn", "unfused"] = "flash"
    """Attention kernels. Fused attention never writes the scores to memory; `unfused` writes and
    reads the scores of all pairs. `flash1` stands for kernels of Dao et al. 2022, "FlashAttention";
    `flash` for kernels since Dao 2023, "FlashAttention-2", which reach 1.7 times their rate (its
    section 4.1); `cudnn` for cuDNN 9 on Hopper, which reaches 1.6 times the rate of `flash`
    (Shah et al. 2024, "FlashAttention-3", figures 5 and 6, heads of 128 at 4,096 positions)."""
    fusion: Literal["compiled", "kernels", "eager"] = "compiled"
    """Fusion of elementwise operations: by a compiler, partly by hand-written kernels, or none, so
    that each operation makes its own pass over memory."""
    overlap_tensor: bool = True
    """Whether matmuls are decomposed to hide collectives of `tensor` (Wang et al. 2023, "Overlap
    Communication with Dependent Computation via Decomposition")."""
    overlap_expert: bool = True
    """Whether the dispatch of tokens to experts overlaps with other computation (DeepSeek-AI 2024,
    "DeepSeek-V3 Technical Report", section 3.2.1)."""
    dispatch_once: bool = False
    """Whether a token travels to a host once, and is copied there to all its experts of that host
    (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.2.2)."""
    overlap_data: bool = True
    """Whether gradients are reduced during the backward pass."""
    overlap_gather: bool = True
    """Whether the parameters of the next layer are gathered while one layer computes."""
    balance_head: bool = False
    """Whether the last pipeline stage holds fewer layers to make up for the head."""
    single_rail: bool = False
    """Whether a collective over hosts uses one NIC of each host instead of all of them: parameters
    are gathered one by one, as in ZeRO-3 of 2021 (Narayanan et al. 2021, section 5.2)."""
    skip_idle: bool = True
    """Whether a stage without a turn waits. Otherwise it computes a result that is discarded."""
    keeps_traced: bool = False
    """Whether the backward pass reads the residuals that JAX traces. Without rematerialisation
    these are all intermediates of norms (in float32) and of activations, and parameters have a copy
    in the compute dtype."""
    sums_each: bool = False
    """Whether each microbatch includes the gradient sums over replicas; see
    `cost.transformer.communication.replica_sums`."""
    whole_params: bool = False
    """Whether parameters that only ZeRO 3 would shard are also whole between steps. The updated
    parameters are then gathered once a step, and otherwise where they are used."""
    exchanges_vectors: bool = False
    """Whether devices exchange the vectors of their ids, if that sends less than the embedding
    table; see `shardlib.nn.lookup`."""
    rerun_chunks: bool = False
    """Whether a pipeline keeps only the inputs of chunks of layers, reruns the chunks before their
    backward pass, and holds embedding and head on every stage."""


SHARDLIB = Software(
    keeps_traced=True,
    sums_each=True,
    whole_params=True,
    exchanges_vectors=True,
    rerun_chunks=True,
)


@functools.lru_cache(4096)
def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
