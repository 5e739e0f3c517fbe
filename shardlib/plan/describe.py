"""Text reports of plans for a terminal."""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardlib.cost.costs import Memory, StepTime
from shardlib.cost.machine.measured import MeasuredCluster
from shardlib.hardware import Cluster
from shardlib.hardware.capacity import capacity
from shardlib.humanize import count, duration, gib
from shardlib.plan.candidates import schedule
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.settings import mesh_text, rules
from shardlib.plan.workloads.module import as_code
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.tables import aligned

if TYPE_CHECKING:
    from shardlib.plan.mixed_result import MixedPlans
    from shardlib.plan.result import Plans

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
_SHOWN = 0.0005
"""Fraction of the whole below which a part is left out."""


def largest_parts(memory: Memory, number: int = 3) -> str:
    """Returns the largest parts of a device's memory, such as `optimizer 8.2 GiB, params 6.2
    GiB`."""
    parts = {name: size for name, size in vars(memory).items() if name != "host" and size}
    largest = sorted(parts, key=lambda name: -parts[name])[:number]
    return ", ".join(f"{name} {gib(parts[name])}" for name in largest)


def describe(plans: "Plans") -> str:
    """Returns the answer as text."""
    best = plans.best
    sections = [
        _headline(plans),
        _ranking(plans),
        _first(plans),
        _broken_down(best, plans.capacity_bytes),
        _summary(plans),
    ]
    if plans.asked:
        sections.append("Why not\n" + indented("\n".join(map(str, plans.asked))))
    if plans.notes:
        sections.append("\n".join(plans.notes))
    return "\n\n".join(sections)


def _first(plans: "Plans") -> str:
    if plans.in_code:
        return f"Plan 1, in code:\n{indented(as_code(plans.best, plans.workload))}"
    return f"Plan 1, for the config:\n{indented(plans.fragment())}"


def _headline(plans: "Plans") -> str:
    best, found = plans.best, plans.found
    cluster = best.cluster
    chips = f"{cluster.num_chips:,} {cluster.chip.full_name}" if cluster.chip else cluster.name
    head = headline(plans.name, plans.workload, f"{cluster.name} ({chips})")
    tried = (
        f"{found.layouts:,} layouts can be run, {found.fitting:,} of them fit; "
        f"{found.priced:,} plans were priced, and a bound rules out the others"
    )
    return f"{head}\n{tried}"


def headline(name: str, workload: Workload, where: str) -> str:
    """Returns the headline of a report: `llama3-8b (8.03B parameters) on v5p-64 (32 TPU v5p), 512
    sequences = 4.19M tokens a step`."""
    if isinstance(workload, TransformerWorkload):
        name += f" ({count(workload.job.model.num_params)} parameters)"
    batch = f"{workload.batch:,} {examples(workload)}"
    if workload.unit == "tokens":
        batch += f" = {count(workload.tokens)} tokens"
    return f"{name} on {where}, {batch} a step"


def examples(workload: Workload) -> str:
    """Returns the unit of a batch: `sequences`, `images` or `examples`."""
    return "sequences" if workload.unit == "tokens" else workload.unit


def speed(workload: Workload, rate: float, num_chips: int) -> str:
    """Returns tokens or images per second, and the attention FLOPs that the MFU counts."""
    line = f"{count(rate)} {workload.unit}/s, {count(rate / num_chips)} a chip"
    # A traced program multiplies as its model says, masked or not.
    return line + ("; MFU counts attention as causal." if _is_causal(workload) else ".")


def _is_causal(workload: Workload) -> bool:
    return isinstance(workload, TransformerWorkload) and workload.job.causal


def beyond_default_share(plans: Iterable[Iterable[tuple[Cluster, float]]]) -> list[str]:
    """Returns notes on the memory fraction to set for plans that exceed JAX's default share of a
    GPU.

    Args:
        plans: Per plan, in order, its clusters and the bytes that a device of each holds.
    """
    beyond: dict[str, list[str]] = {}
    for number, devices in enumerate(plans, 1):
        for cluster, held_bytes in devices:
            limit = None if isinstance(cluster, MeasuredCluster) else capacity(cluster.chip)
            if limit is not None and not limit.default_share_suffices(math.ceil(held_bytes)):
                beyond.setdefault(limit.note, []).append(str(number))
                break
    return [
        f"{note} for plan{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}."
        for note, numbers in beyond.items()
    ]


def _ranking(plans: "Plans") -> str:
    rows = [("", "mesh", "rules", "micro", "schedule", "remat", "step", "MFU", "memory")]
    for number, plan in enumerate(plans.found.plans, 1):
        named = rules(plan.layout)
        rows.append(
            (
                str(number),
                mesh_text(plan.layout),
                named if isinstance(named, str) else f"{named['preset']}+sequence",
                str(plan.layout.microbatches),
                schedule(plan.layout) or "-",
                plan.choice.summary(plans.workload.num_layers),
                duration(plan.seconds),
                f"{plans.mfu(plan):.1%}" if plans.mfu(plan) else "-",
                gib(plan.memory.total),
            )
        )
    return "\n".join(aligned(rows, right=(0, 3, 6, 7, 8)))


def time_table(time: StepTime) -> list[str]:
    """Returns the parts of a step as lines, longest first."""
    rows = [
        (PARTS[name], duration(seconds), f"{seconds / time.total:.1%}")
        for name, seconds in sorted(time.parts.items(), key=lambda item: -item[1])
        if seconds > _SHOWN * time.total
    ]
    return each("  ", aligned(rows, right=(1, 2)))


def memory_table(memory: Memory, capacity: float) -> list[str]:
    """Returns the memory of a device as lines, with fractions of its capacity."""
    held = [
        (name, gib(size), f"{size / capacity:.1%}")
        for name, size in vars(memory).items()
        if name != "host" and size > _SHOWN * memory.total
    ]
    held.append(("of " + gib(capacity), gib(memory.total), f"{memory.total / capacity:.1%}"))
    if memory.host:
        held.append(("on the host", gib(memory.host), ""))
    return each("  ", aligned(held, right=(1, 2)))


def _broken_down(plan: Plan, capacity: float) -> str:
    lines = ["Time of a step", *time_table(plan.time)]
    lines += ["Memory of a device at the peak", *memory_table(plan.memory, capacity)]
    return "\n".join(lines)


def outcome(plans: "Plans | MixedPlans", priced: str = "") -> list[str]:
    """Returns lines on the time of the first plan, its uncertainty and its bottleneck."""
    best, error = plans.best, plans.error
    low, high = best.seconds / (1 + error), best.seconds * (1 + error)
    lines = [
        f"A step takes {duration(best.seconds)}; {plans.error_source}: "
        f"{duration(low)} to {duration(high)} ({error:.0%}).",
        speed(plans.workload, plans.rate, plans.cluster.num_chips),
        f"Bottleneck: {PARTS[best.time.bottleneck]}, "
        f"{best.time.parts[best.time.bottleneck] / best.seconds:.0%} of the step.",
    ]
    if plans.tokens:
        lines.append(
            f"{count(plans.tokens)} {plans.workload.unit}: {duration(plans.run_seconds)}, "
            f"{plans.chip_hours:,.0f} chip-hours{priced}."
        )
    return lines


def _summary(plans: "Plans") -> str:
    lines = outcome(plans, _priced(plans))
    if plans.levers:
        lines += ["What would move it:", *each("  ", map(str, plans.levers))]
    return "\n".join(lines)


def _priced(plans: "Plans") -> str:
    return "" if plans.cost is None else f", ${plans.cost:,.0f} at ${plans.goal.price:g} an hour"


def indented(text: str) -> str:
    """Returns indented lines."""
    return "\n".join(each("  ", text.rstrip().splitlines()))


def each(prefix: str, lines: Iterable[str]) -> list[str]:
    """Returns the lines with a prefix."""
    return [prefix + line for line in lines]
