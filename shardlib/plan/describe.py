"""Plans as text for a terminal."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from shardlib.plan.candidates import schedule
from shardlib.plan.problem import Plan
from shardlib.plan.settings import mesh_text, rules

if TYPE_CHECKING:
    from shardlib.plan.answer import Plans

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
"""Parts of `StepTime` in words; collectives are what computation does not hide of them."""
_SHOWN = 0.0005
"""Parts of less than this share of the whole are left out."""


def gib(num_bytes: float) -> str:
    """Returns bytes as in `4.2 GiB`."""
    return f"{num_bytes / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """Returns a time as in `12.3 ms`, `4.56 s`, `3.2 hours` or `30.1 days`."""
    for unit, name in ((86400, "days"), (3600, "hours")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.4g} s"


def count(number: float) -> str:
    """Returns a large number as in `4.2M`."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.3g}"


def table(rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Returns rows as lines with aligned columns; those in `right` are flush right."""
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def describe(plans: "Plans") -> str:
    """Returns the answer as text."""
    best = plans.best
    sections = [
        _headline(plans),
        _ranking(plans),
        f"Plan 1, for the config:\n{_indented(plans.fragment())}",
        _broken_down(best, plans.capacity_bytes),
        _summary(plans),
    ]
    if plans.asked:
        sections.append("Why not\n" + _indented("\n".join(map(str, plans.asked))))
    if plans.notes:
        sections.append("\n".join(plans.notes))
    return "\n\n".join(sections)


def _headline(plans: "Plans") -> str:
    best, found = plans.best, plans.found
    cluster = best.cluster
    chips = f"{cluster.num_chips:,} {cluster.chip.full_name}" if cluster.chip else cluster.name
    head = f"{plans.name} on {cluster.name} ({chips}), {plans.workload.batch:,} a step"
    if plans.workload.unit == "tokens":
        head += f" = {count(plans.workload.tokens)} tokens"
    tried = f"{found.layouts:,} layouts can be run, {found.fitting:,} fit, {found.priced:,} priced"
    return f"{head}\n{tried}"


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
                plan.choice.policy(plans.workload.num_layers),
                duration(plan.seconds),
                f"{plans.mfu(plan):.1%}" if plans.mfu(plan) else "-",
                gib(plan.memory.total),
            )
        )
    return "\n".join(table(rows, right=(0, 3, 6, 7, 8)))


def _broken_down(plan: Plan, capacity: float) -> str:
    total = plan.seconds
    time = [
        (PARTS[name], duration(seconds), f"{seconds / total:.1%}")
        for name, seconds in sorted(plan.time.parts.items(), key=lambda item: -item[1])
        if seconds > _SHOWN * total
    ]
    held = [
        (name, gib(size), f"{size / capacity:.1%}")
        for name, size in vars(plan.memory).items()
        if name != "host" and size > _SHOWN * plan.memory.total
    ]
    held.append(
        ("of " + gib(capacity), gib(plan.memory.total), f"{plan.memory.total / capacity:.1%}")
    )
    if plan.memory.host:
        held.append(("on the host", gib(plan.memory.host), ""))
    lines = ["Time of a step", *_each("  ", table(time, right=(1, 2)))]
    lines += ["Memory of a device at the peak", *_each("  ", table(held, right=(1, 2)))]
    return "\n".join(lines)


def _summary(plans: "Plans") -> str:
    best, error = plans.best, plans.error
    low, high = best.seconds / (1 + error), best.seconds * (1 + error)
    lines = [
        f"A step takes {duration(best.seconds)}; {plans.error_source}: "
        f"{duration(low)} to {duration(high)} ({error:.0%}).",
        f"{count(plans.rate)} {plans.workload.unit}/s, "
        f"{count(plans.rate / best.cluster.num_chips)} a chip.",
        f"Bottleneck: {PARTS[best.time.bottleneck]}, "
        f"{best.time.parts[best.time.bottleneck] / best.seconds:.0%} of the step.",
    ]
    if plans.tokens:
        lines.append(
            f"{count(plans.tokens)} {plans.workload.unit}: {duration(plans.run_seconds)}, "
            f"{plans.chip_hours:,.0f} chip-hours{_priced(plans)}."
        )
    if plans.levers:
        lines += ["What would move it:", *_each("  ", map(str, plans.levers))]
    return "\n".join(lines)


def _priced(plans: "Plans") -> str:
    return "" if plans.cost is None else f", ${plans.cost:,.0f} at ${plans.goal.price:g} an hour"


def _indented(text: str) -> str:
    return "\n".join(_each("  ", text.rstrip().splitlines()))


def _each(prefix: str, lines: Iterable[str]) -> list[str]:
    return [prefix + line for line in lines]
