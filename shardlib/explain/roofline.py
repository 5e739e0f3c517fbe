"""What bounds a compiled step: its FLOPs, the bytes of memory it moves, the bytes it sends.

Each resource takes its work divided by what the chip does at most; the largest binds, and the step
takes at least that long (Williams et al. 2009, "Roofline"). FLOPs are those of the traced step by
the conventions of `shardlib.explain.flops`, as often as devices compute the same; bytes those of
the kernels of the compiled program, by `shardlib.explain.work`.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from shardlib.chips import Chip
from shardlib.explain.flops import STAGES, Flops, Stage, count_flops, stage_of
from shardlib.explain.hlo import Module, arrays
from shardlib.explain.params import ParamsReport, bytes_text
from shardlib.explain.timing import Flow
from shardlib.explain.work import Work
from shardlib.hardware import Cluster
from shardlib.mesh import entry_axes

_NONE: Mapping[int, Collection[int]] = MappingProxyType({})
_KERNEL = re.compile(r"tpu_custom_call|cudnn|triton|onednn|eigen", re.IGNORECASE)

Resource = Literal["compute", "memory", "network", "unknown"]
Precision = Literal["bf16", "fp16", "fp8"]

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
        flops: Hardware FLOPs: an equal share of all devices, times what they compute alike.
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
        flops = sum(stage.flops for stage in self.stages)
        return flops / self.memory_bytes if self.memory_bytes else math.inf

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
        return _redundancy(self.compiled_flops, self.num_devices, self.flops)


def read_roofline(
    jaxpr: Any,
    module: Module,
    mesh: Mapping[str, int],
    cluster: Cluster | None = None,
    flows: tuple[Flow, ...] | None = None,
    *,
    vocabularies: Mapping[int, Collection[int]] = _NONE,
) -> Roofline:
    """Returns what a step takes of each resource.

    Args:
        jaxpr: The traced step.
        module: The program it was compiled to.
        mesh: Sizes of the mesh axes.
        cluster: What it runs on; without, there are no seconds.
        flows: What `collective_times` returns, for the seconds of the network; None where they are
            not known.
        vocabularies: Sizes of the vocabulary, each with what devices hold of it, as a whole or cut:
            what has such a dim belongs to the head.
    """
    devices = math.prod(mesh.values())
    flops = count_flops(jaxpr, vocabularies)
    chip = cluster.chip if cluster is not None else None
    precision = _precision(flops)
    peak = chip.flops_per_device(precision) if chip else None
    bandwidth = chip.memory_bytes_per_second / chip.devices_per_chip if chip else None
    heads = frozenset(size for held in vocabularies.values() for size in held)
    moved, compiled = _program(Work(module), heads)
    share = max(_redundancy(compiled, devices, flops), 1.0) / devices
    computed: dict[Stage, float] = {s: total * share for s, total in flops.hardware.items()}
    network, unknown = _network(flows)
    stages = _stages(computed, moved, network, peak, bandwidth)
    notes = (*_notes(flops, _left_out(module)), *_unknown(chip, precision), *unknown)
    return Roofline(flops, compiled, devices, stages, peak, bandwidth, notes)


def vocabularies_of(params: ParamsReport) -> dict[int, frozenset[int]]:
    """Returns the sizes of dims that a parameter calls `vocab`, each with what devices hold of it:
    the whole, or a part by some of the mesh axes that cut it. A part that is as long as a part of
    another dim tells nothing."""
    held: dict[int, set[int]] = collections.defaultdict(set)
    others: set[int] = set()
    for row in params.rows:
        if row.section != "params":
            continue
        names = row.logical_axes or (None,) * len(row.shape)
        specs = itertools.chain(row.spec, itertools.repeat(None))
        for name, size, entry in zip(names, row.shape, specs, strict=False):
            parts = {size}
            for axis in entry_axes(entry):
                parts |= {part // params.mesh[axis] for part in parts}
            (held[size] if name == "vocab" else others).update(parts)
    return {size: frozenset({size} | (parts - others)) for size, parts in held.items()}


def _stages(
    computed: Mapping[Stage, float],
    moved: Mapping[Stage, float],
    network: Mapping[Stage, float] | None,
    peak: float | None,
    bandwidth: float | None,
) -> tuple[StageCost, ...]:
    found = []
    for stage in STAGES:
        flops, size = computed.get(stage, 0.0), moved.get(stage, 0.0)
        sending = None if network is None else network.get(stage, 0.0)
        if flops or size or sending:
            seconds = (flops / peak if peak else None, size / bandwidth if bandwidth else None)
            found.append(StageCost(stage, flops, size, *seconds, sending))
    return tuple(found)


def _precision(flops: Flops) -> Precision:
    """The format of most matmuls: float32 is multiplied as bfloat16 unless more is asked for."""
    dtype = max(flops.by_dtype, key=lambda name: flops.by_dtype[name], default="")
    return "fp8" if dtype.startswith("float8") else "fp16" if dtype == "float16" else "bf16"


def _redundancy(compiled: float, devices: int, flops: Flops) -> float:
    total = flops.total_hardware
    return compiled * devices / total if total else 1.0


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


def _network(
    flows: tuple[Flow, ...] | None,
) -> tuple[dict[Stage, float] | None, tuple[str, ...]]:
    """Returns the seconds of collectives by stage, None where there are none to sum, and what is
    not in them."""
    unknown = [flow for flow in flows or () if flow.total_seconds is None]
    if flows is None or (unknown and len(unknown) == len(flows)):
        return None, ("the seconds of the network are not known",)
    found: dict[Stage, float] = collections.defaultdict(float)
    differentiated = any("jvp(" in flow.collective.op_name for flow in flows)
    for flow in flows:
        stage = stage_of(flow.collective.op_name, differentiated=differentiated)
        found[stage] += flow.total_seconds or 0.0
    if not unknown:
        return found, ()
    sent = bytes_text(sum(flow.collective.sent_bytes for flow in unknown))
    count = f"{len(unknown)} of {len(flows)} collectives"
    return found, (f"the seconds of the network leave out {count}: {sent} sent by a device",)


def _notes(flops: Flops, left_out: Mapping[str, int]) -> Iterator[str]:
    for name, count in flops.uncounted.items():
        yield f"the FLOPs of {name} are not known; it runs {count} times in a step"
    if flops.uncounted_loops:
        yield f"{flops.uncounted_loops} loops with matmuls have no known length and count once"
    if flops.ragged:
        yield f"{flops.ragged} ragged matmuls count all their rows, filled or not"
    if left_out:
        kernels = ", ".join(f"{count} {name}" for name, count in left_out.items())
        yield f"compiled FLOPs leave out what is in {kernels}"


def _unknown(chip: Chip | None, precision: Precision) -> Iterator[str]:
    if chip is None:
        yield "no chip, so no seconds"
    elif chip.flops_per_device(precision) is None:
        yield f"the {chip.full_name} has no matmul in {precision}"


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
