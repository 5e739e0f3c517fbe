"""Roofline of a compiled step: its time bounds by FLOPs, memory traffic and bytes sent.

The time of each resource is its work divided by the peak rate of the chip, which for FLOPs is that
of the dtype that is multiplied. The longest time binds, and the step takes at least that long
(Williams et al. 2009, "Roofline"). FLOPs come from the traced step by the conventions of
`shardlib.explain.analysis.flops`, times the redundancy of the compiled
program. Bytes come from the kernels of the compiled program, by
`shardlib.explain.analysis.kernel_cost`.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from shardlib import humanize
from shardlib.cost.costs import pass_of, undifferentiated
from shardlib.cost.machine.rates import peak_flops
from shardlib.cost.workload import Precision
from shardlib.explain.analysis.flops import STAGES, Flops, Stage, count_flops
from shardlib.explain.analysis.kernel_cost import KernelCosts
from shardlib.explain.analysis.params import ParamsReport
from shardlib.explain.analysis.timing import Flow
from shardlib.explain.hlo.text import Module, arrays, dims
from shardlib.hardware import Cluster
from shardlib.hardware.chips import Chip
from shardlib.mesh import entry_axes

_NONE: Mapping[int, Collection[int]] = MappingProxyType({})
_KERNEL = re.compile(r"tpu_custom_call|cudnn|triton|onednn|eigen", re.IGNORECASE)

Resource = Literal["compute", "memory", "network", "unknown"]

CONVENTIONS: Mapping[str, str] = {
    "model FLOPs": "matmuls and convolutions of the loss and its gradients, 2 per multiply-add, "
    "without recomputation; attention over the pairs that the implementation computes",
    "hardware FLOPs": "model FLOPs, plus recomputation in the backward pass and matmuls of the "
    "optimizer",
    "compiled FLOPs": "matmuls in the compiled program of one device, times loop trips",
    "memory": "operands and results of each kernel of the compiled program, times loop trips",
    "network": "collectives by ring algorithms on the cluster's links, without overlap",
}
"""Definition of each figure."""


@dataclasses.dataclass(frozen=True)
class StageCost:
    """Cost of one stage of training on one device.

    Attributes:
        stage: `forward`, `recompute`, `backward`, `head` (logits and loss, both ways) or
            `optimizer` (and everything that is not differentiated).
        flops: Hardware FLOPs: an equal share of all devices, times the redundancy.
        memory_bytes: Bytes that kernels read and write.
        compute_seconds: Seconds of compute at the chip's peaks for the dtypes that it multiplies;
            None if one is unknown.
        memory_seconds: Seconds of memory traffic at the chip's peak bandwidth; None if unknown.
        network_seconds: Seconds of its collectives; None if unknown.
    """

    stage: Stage
    flops: float
    memory_bytes: float
    compute_seconds: float | None
    memory_seconds: float | None
    network_seconds: float | None

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory traffic."""
        return self.flops / self.memory_bytes if self.memory_bytes else math.inf

    @property
    def binding(self) -> Resource:
        """The resource that takes longest."""
        return _binding(self.compute_seconds, self.memory_seconds, self.network_seconds)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """KernelCosts and time of a step by resource.

    Attributes:
        flops: FLOPs of the traced step, over all devices.
        compiled_flops: FLOPs of the compiled program, on one device; more than an equal share of
            `flops` if devices compute the same.
        num_devices: Number of devices that the step runs on.
        stages: The stages of training, which add up to the step.
        peak_flops: Peak FLOP/s of one device in the dtype of most FLOPs; None if unknown.
        peak_memory: Peak bytes/s of one device's memory; None if unknown.
        exposed_seconds: Seconds of collectives during which no computation runs, by the schedule of
            the program; None if unknown.
        notes: Notes on figures that are incomplete or unknown.
    """

    flops: Flops
    compiled_flops: float
    num_devices: int
    stages: tuple[StageCost, ...]
    peak_flops: float | None
    peak_memory: float | None
    notes: tuple[str, ...] = ()
    exposed_seconds: float | None = None

    @property
    def memory_bytes(self) -> float:
        """Bytes that the kernels of one device read and write."""
        return sum(stage.memory_bytes for stage in self.stages)

    @property
    def intensity(self) -> float:
        """Hardware FLOPs per byte of memory traffic."""
        flops = sum(stage.flops for stage in self.stages)
        return flops / self.memory_bytes if self.memory_bytes else math.inf

    @property
    def seconds(self) -> dict[str, float | None]:
        """Seconds of the step by resource, as if it used only that resource."""
        return {
            "compute": _total([stage.compute_seconds for stage in self.stages]),
            "memory": _total([stage.memory_seconds for stage in self.stages]),
            "network": _total([stage.network_seconds for stage in self.stages]),
        }

    @property
    def busy_seconds(self) -> float | None:
        """Seconds of compute or memory traffic, whichever takes longer in each stage."""
        both = [(stage.compute_seconds, stage.memory_seconds) for stage in self.stages]
        return _total([None if c is None or m is None else max(c, m) for c, m in both])

    @property
    def step_seconds(self) -> float | None:
        """Seconds that a step takes at least: busy and exposed; None if either is unknown."""
        busy, exposed = self.busy_seconds, self.exposed_seconds
        return None if busy is None or exposed is None else busy + exposed

    @property
    def binding(self) -> Resource:
        """The resource that takes longest."""
        seconds = self.seconds
        return _binding(seconds["compute"], seconds["memory"], seconds["network"])

    @property
    def redundancy(self) -> float:
        """Compiled FLOPs of all devices over hardware FLOPs; above 1 if devices repeat work."""
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
    """Returns the roofline of a step. Without a cluster, seconds of compute and memory are unknown,
    as are network seconds without the result of `collective_times`. `vocabularies` gives each size
    with its sizes on a device; an operation with such a dim belongs to the head."""
    devices = math.prod(mesh.values())
    flops = count_flops(jaxpr, vocabularies)
    chip = cluster.chip if cluster is not None else None
    peaks = _peaks(flops, chip)
    bandwidth = chip.memory_bytes_per_second / chip.devices_per_chip if chip else None
    heads = frozenset(size for held in vocabularies.values() for size in held)
    moved, compiled = _program(KernelCosts(module), heads)
    share = max(_redundancy(compiled, devices, flops), 1.0) / devices
    computed: dict[Stage, float] = {s: total * share for s, total in flops.hardware.items()}
    seconds: dict[Stage, float | None]
    seconds = {stage: _compute_seconds(flops, stage, share, peaks) for stage in flops.hardware}
    network, unknown = _network(flows)
    stages = _stages(computed, seconds, moved, network, bandwidth)
    notes = (*_notes(flops, _left_out(module)), *_unknown(chip, peaks), *unknown)
    peak = peaks[max(peaks, key=lambda name: _flops_in(flops, name))]
    return Roofline(flops, compiled, devices, stages, peak, bandwidth, notes, _exposed(flows))


def vocabularies_of(params: ParamsReport) -> dict[int, frozenset[int]]:
    """Returns the sizes of parameter dims named `vocab`, each with its possible sizes on a device.

    These are the whole size and its parts by any of the mesh axes that shard it. A part that is as
    long as a part of another dim is ambiguous and left out.
    """
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
    compute_seconds: Mapping[Stage, float | None],
    moved: Mapping[Stage, float],
    network: Mapping[Stage, float] | None,
    bandwidth: float | None,
) -> tuple[StageCost, ...]:
    costs = []
    for stage in STAGES:
        flops, size = computed.get(stage, 0.0), moved.get(stage, 0.0)
        sending = None if network is None else network.get(stage, 0.0)
        if flops or size or sending:
            moving = size / bandwidth if bandwidth else None
            computing = compute_seconds.get(stage, 0.0 if bandwidth else None)
            costs.append(StageCost(stage, flops, size, computing, moving, sending))
    return tuple(costs)


def _peaks(flops: Flops, chip: Chip | None) -> dict[Precision, float | None]:
    """Returns the peak FLOP/s of a device in each format that a step multiplies."""
    found = {_precision(dtype) for held in flops.by_dtype.values() for dtype in held}
    formats: list[Precision] = [name for name in get_args(Precision) if name in found] or ["bf16"]
    return {name: peak_flops(chip, name) if chip else None for name in formats}


def _precision(dtype: str) -> Precision:
    known: dict[str, Precision] = {"float16": "fp16", "float32": "f32", "int8": "int8"}
    return "fp8" if dtype.startswith("float8") else known.get(dtype, "bf16")


def _flops_in(flops: Flops, precision: Precision) -> float:
    found = (held.items() for held in flops.by_dtype.values())
    return sum(n for dtype, n in itertools.chain(*found) if _precision(dtype) == precision)


def _compute_seconds(
    flops: Flops, stage: Stage, share: float, peaks: Mapping[Precision, float | None]
) -> float | None:
    """Returns the seconds of a stage's FLOPs, of which a device computes a share."""
    seconds = 0.0
    for dtype, count in flops.by_dtype.get(stage, {}).items():
        peak = peaks[_precision(dtype)]
        if peak is None:
            return None
        seconds += count * share / peak
    return seconds


def _redundancy(compiled: float, devices: int, flops: Flops) -> float:
    total = flops.total_hardware
    return compiled * devices / total if total else 1.0


def _program(work: KernelCosts, vocabularies: frozenset[int]) -> tuple[dict[Stage, float], float]:
    """Returns the bytes of a compiled program by stage, and the FLOPs of its matmuls."""
    moved: dict[Stage, float] = collections.defaultdict(float)
    flops = 0.0
    module = work.module
    kernels = [(where, kernel, _name(module, where, kernel)) for where, kernel in work.kernels]
    outside = undifferentiated(name for _, _, name in kernels)
    for where, kernel, name in kernels:
        times = module.execution(where).count
        size = work.bytes_of(where, kernel)
        stage: Stage = pass_of(name, outside)
        if stage != "optimizer" and _has_dim(kernel.shape, vocabularies):
            stage = "head"
        moved[stage] += size * times
        flops += work.flops_of(where, kernel) * times
    return moved, flops


def _name(module: Module, where: str, kernel: Any) -> str:
    """Returns the JAX name of a kernel, else of its origin, else of the loop that it is in.

    A name without a path, such as `convert.14`, is of the compiler.
    """
    for name in (kernel.op_name, module.origin(where, kernel).op_name):
        if "/" in name:
            return name
    callers = module.callers.get(where, [])
    return _name(module, *callers[0]) if callers else ""


def _has_dim(shape: str, sizes: frozenset[int]) -> bool:
    return any(not sizes.isdisjoint(dims(array)) for array in arrays(shape))


def _network(
    flows: tuple[Flow, ...] | None,
) -> tuple[dict[Stage, float] | None, tuple[str, ...]]:
    """Returns the seconds of collectives by stage, and notes on what they leave out.

    The seconds are None if no collective has known seconds.
    """
    unknown = [flow for flow in flows or () if flow.total_seconds is None]
    if flows is None or (unknown and len(unknown) == len(flows)):
        return None, ("network seconds are not known",)
    seconds: dict[Stage, float] = collections.defaultdict(float)
    outside = undifferentiated(flow.collective.op_name for flow in flows)
    for flow in flows:
        seconds[pass_of(flow.collective.op_name, outside)] += flow.total_seconds or 0.0
    if not unknown:
        return seconds, ()
    sent = humanize.size(sum(flow.collective.sent_bytes for flow in unknown))
    count = f"{len(unknown)} of {len(flows)} collectives"
    return seconds, (f"network seconds leave out {count}: {sent} sent by a device",)


def _exposed(flows: tuple[Flow, ...] | None) -> float | None:
    """Returns the seconds of collectives that nothing hides; None if any of them is unknown."""
    if flows is None or any(flow.hidden_seconds is None for flow in flows):
        return None
    return sum((flow.total_seconds or 0.0) - (flow.hidden_seconds or 0.0) for flow in flows)


def _notes(flops: Flops, left_out: Mapping[str, int]) -> Iterator[str]:
    for name, count in flops.uncounted.items():
        yield f"the FLOPs of {name} are not known; it runs {count} times in a step"
    if flops.uncounted_loops:
        yield f"{flops.uncounted_loops} loops with matmuls have unknown length and count once"
    if flops.ragged:
        yield f"{flops.ragged} ragged matmuls count all their rows, filled or not"
    if left_out:
        kernels = ", ".join(f"{count} {name}" for name, count in left_out.items())
        yield f"compiled FLOPs leave out {kernels}"


def _unknown(chip: Chip | None, peaks: Mapping[Precision, float | None]) -> Iterator[str]:
    if chip is None:
        yield "seconds are not known without a chip"
        return
    for precision, peak in peaks.items():
        if peak is None:
            yield f"the {chip.full_name} has no matmul in {precision}"


def _left_out(module: Module) -> dict[str, int]:
    """Returns the execution counts of opaque kernels that may contain matmuls."""
    counts: dict[str, int] = collections.Counter()
    for where, instructions in module.computations.items():
        for instruction in instructions:
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            if instruction.opcode == "custom-call" and _KERNEL.search(target):
                counts[target] += module.execution(where).count
    return counts


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
