"""What bounds a compiled step: its FLOPs, the bytes of memory it moves, the bytes it sends.

Each resource takes its work divided by what the chip does at most; the largest binds, and the step
takes at least that long (Williams et al. 2009, "Roofline"). FLOPs are those of the traced step by
the conventions of `shardlib.explain.flops`, bytes those of the kernels of the compiled program, by
`shardlib.explain.work`.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal

from shardlib.chips import Chip
from shardlib.explain.flops import STAGES, Flops, Stage, count_flops, stage_of
from shardlib.explain.hlo import Module, arrays
from shardlib.explain.timing import Flow
from shardlib.explain.work import Work
from shardlib.hardware import Cluster

_KERNEL = re.compile(r"tpu_custom_call|cudnn|triton|onednn|eigen", re.IGNORECASE)

Resource = Literal["compute", "memory", "network", "unknown"]

CONVENTIONS: Mapping[str, str] = {
    "model FLOPs": "matmuls and convolutions of the loss and its gradients, 2 a multiply-add, "
    "without recomputation; attention over the pairs that the implementation computes",
    "hardware FLOPs": "as model FLOPs, with what the backward pass computes again and what the "
    "optimizer multiplies",
    "compiled FLOPs": "matmuls in the compiled program of one device, times loop trips",
    "memory": "operands and results of each kernel of the compiled program, times loop trips",
    "network": "collectives by ring algorithms on the cluster's links, none hidden",
}
"""What each figure counts."""


@dataclasses.dataclass(frozen=True)
class StageCost:
    """One part of training on one device.

    Attributes:
        stage: `forward`, `recompute`, `backward`, `head` (logits and loss, both ways) or
            `optimizer` (and all that no gradient is taken of).
        flops: Hardware FLOPs, an equal share of all devices.
        memory_bytes: Bytes that kernels read and write.
        compute_seconds: At the chip's peak; None where it is not known.
        memory_seconds: At the chip's peak bandwidth; None where it is not known.
        network_seconds: Of its collectives; None where they are not known.
    """

    stage: Stage
    flops: float
    memory_bytes: float
    compute_seconds: float | None
    memory_seconds: float | None
    network_seconds: float | None

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of memory."""
        return self.flops / self.memory_bytes if self.memory_bytes else math.inf

    @property
    def binding(self) -> Resource:
        """The resource that takes longest."""
        return _binding(self.compute_seconds, self.memory_seconds, self.network_seconds)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What a step takes of each resource.

    Attributes:
        flops: Of the traced step, over all devices.
        compiled_flops: Of the compiled program, on one device; more than a share of `flops` where
            devices compute the same.
        num_devices: Devices that the step runs on.
        stages: The parts of training; their sums are those of the step.
        peak_flops: FLOP/s of one device; None where it is not known.
        peak_memory: Bytes/s of one device's memory; None where it is not known.
        notes: What could not be counted.
    """

    flops: Flops
    compiled_flops: float
    num_devices: int
    stages: tuple[StageCost, ...]
    peak_flops: float | None
    peak_memory: float | None
    notes: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> float:
        """Bytes that the kernels of one device read and write."""
        return sum(stage.memory_bytes for stage in self.stages)

    @property
    def intensity(self) -> float:
        """Hardware FLOPs for each byte of memory."""
        flops = self.flops.total_hardware / self.num_devices
        return flops / self.memory_bytes if self.memory_bytes else math.inf

    @property
    def ridge(self) -> float | None:
        """FLOPs for each byte above which the chip's matmuls bind and not its memory."""
        if self.peak_flops is None or self.peak_memory is None:
            return None
        return self.peak_flops / self.peak_memory

    @property
    def seconds(self) -> dict[str, float | None]:
        """Seconds of the step by resource, as if it used that one alone."""
        return {
            "compute": _total([stage.compute_seconds for stage in self.stages]),
            "memory": _total([stage.memory_seconds for stage in self.stages]),
            "network": _total([stage.network_seconds for stage in self.stages]),
        }

    @property
    def binding(self) -> Resource:
        """The resource that takes longest."""
        seconds = self.seconds
        return _binding(seconds["compute"], seconds["memory"], seconds["network"])

    @property
    def redundancy(self) -> float:
        """Compiled FLOPs of all devices over hardware FLOPs: above 1 where devices repeat work."""
        total = self.flops.total_hardware
        return self.compiled_flops * self.num_devices / total if total else 1.0


def read_roofline(
    jaxpr: Any,
    module: Module,
    mesh: Mapping[str, int],
    cluster: Cluster | None = None,
    flows: tuple[Flow, ...] = (),
    *,
    vocabularies: Collection[int] = (),
    precision: Literal["bf16", "fp16", "fp8"] = "bf16",
) -> Roofline:
    """Returns what a step takes of each resource.

    Args:
        jaxpr: The traced step.
        module: The program it was compiled to.
        mesh: Sizes of the mesh axes.
        cluster: What it runs on; without, there are no seconds.
        flows: What `collective_times` returns, for the seconds of the network.
        vocabularies: Sizes of the vocabulary: what has such a dim belongs to the head.
        precision: Of its matmuls.
    """
    devices = math.prod(mesh.values())
    flops = count_flops(jaxpr, vocabularies)
    chip = cluster.chip if cluster is not None else None
    peak = chip.flops_per_device(precision) if chip else None
    bandwidth = chip.memory_bytes_per_second / chip.devices_per_chip if chip else None
    work = Work(module)
    heads = _cut_vocabularies(vocabularies, mesh)
    moved, compiled = _program(work, heads)
    network = _network(flows)
    stages = tuple(
        StageCost(
            stage,
            flops.hardware.get(stage, 0.0) / devices,
            moved.get(stage, 0.0),
            flops.hardware.get(stage, 0.0) / devices / peak if peak else None,
            moved.get(stage, 0.0) / bandwidth if bandwidth else None,
            network.get(stage, 0.0) if network is not None else None,
        )
        for stage in STAGES
        if flops.hardware.get(stage) or moved.get(stage)
    )
    notes = _notes(flops, _left_out(module), chip, precision, network is None)
    return Roofline(flops, compiled, devices, stages, peak, bandwidth, notes)


def _program(work: Work, vocabularies: frozenset[int]) -> tuple[dict[Stage, float], float]:
    """Returns the bytes of a compiled program by stage, and the FLOPs of its matmuls."""
    moved: dict[Stage, float] = collections.defaultdict(float)
    flops = 0.0
    module = work.module
    kernels = [(where, kernel, _name(module, where, kernel)) for where, kernel in work.kernels]
    differentiated = any("jvp(" in name for _, _, name in kernels)
    for where, kernel, name in kernels:
        times = module.execution(where).count
        size = work.bytes_of(where, kernel)
        stage = stage_of(name, differentiated=differentiated)
        if stage != "optimizer" and _has_dim(kernel.shape, vocabularies):
            stage = "head"
        moved[stage] += size * times
        flops += work.flops_of(where, kernel) * times
    return moved, flops


def _name(module: Module, where: str, kernel: Any) -> str:
    """The JAX name of a kernel, else of the loop that it stands in, which copies around it lack."""
    if kernel.op_name:
        return kernel.op_name
    origin = module.origin(where, kernel).op_name
    if origin:
        return origin
    callers = module.callers.get(where, [])
    return _name(module, *callers[0]) if callers else ""


def _has_dim(shape: str, sizes: frozenset[int]) -> bool:
    for array in arrays(shape):
        inside = array[array.index("[") + 1 : -1]
        if any(int(dim.removeprefix("<=")) in sizes for dim in inside.split(",") if dim):
            return True
    return False


def _cut_vocabularies(sizes: Collection[int], mesh: Mapping[str, int]) -> frozenset[int]:
    """The vocabulary as devices hold it: whole, or cut over one or more mesh axes."""
    products = {1}
    for size in mesh.values():
        products |= {product * size for product in products}
    return frozenset(size // n for size in sizes for n in products if size % n == 0 and size > n)


def _network(flows: tuple[Flow, ...]) -> dict[Stage, float] | None:
    """Returns the seconds of collectives by stage, or None where there are no seconds."""
    if not flows or any(flow.total_seconds is None for flow in flows):
        return None
    found: dict[Stage, float] = collections.defaultdict(float)
    differentiated = any("jvp(" in flow.collective.op_name for flow in flows)
    for flow in flows:
        stage = stage_of(flow.collective.op_name, differentiated=differentiated)
        found[stage] += flow.total_seconds or 0.0
    return found


def _notes(
    flops: Flops,
    left_out: Mapping[str, int],
    chip: Chip | None,
    precision: str,
    without_network: bool,
) -> tuple[str, ...]:
    found = [
        f"the FLOPs of {name} are not known; it runs {count} times in a step"
        for name, count in flops.uncounted.items()
    ]
    if flops.uncounted_loops:
        found.append(
            f"{flops.uncounted_loops} loops with matmuls have no known length and count once"
        )
    if flops.ragged:
        found.append(f"{flops.ragged} ragged matmuls count all their rows, filled or not")
    if left_out:
        kernels = ", ".join(f"{count} {name}" for name, count in left_out.items())
        found.append(f"compiled FLOPs leave out what is in {kernels}")
    if chip is None:
        found.append("no chip, so no seconds")
    elif chip.flops_per_device(precision) is None:  # type: ignore[arg-type]
        found.append(f"the {chip.full_name} has no matmul in {precision}")
    if without_network:
        found.append("the seconds of the network are not known")
    return tuple(found)


def _left_out(module: Module) -> dict[str, int]:
    """Returns the kernels of a compiled program that may multiply and are not read."""
    found: dict[str, int] = collections.Counter()
    for where, instructions in module.computations.items():
        for instruction in instructions:
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            if instruction.opcode == "custom-call" and _KERNEL.search(target):
                found[target] += module.execution(where).count
    return found


def _binding(compute: float | None, memory: float | None, network: float | None) -> Resource:
    if compute is None or memory is None:
        return "unknown"
    seconds: dict[Resource, float] = {"compute": compute, "memory": memory}
    if network is not None:
        seconds["network"] = network
    return max(seconds, key=lambda resource: seconds[resource])


def _total(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known else None
