"""Text reports of plans for a terminal."""

import math
from collections.abc import Callable, Iterable, Sequence

from shardlib.cost.costs import Memory, StepTime
from shardlib.humanize import count, duration, gib, repeats
from shardlib.nn.stages import StageCut
from shardlib.plan.answer import Answer, AnyPlan
from shardlib.plan.mixed_search import Alone, KindShare, MixedPlan
from shardlib.plan.problem import PARTS, Plan, Workload, examples
from shardlib.plan.search import capacity_bytes
from shardlib.plan.sensitivity import Lever
from shardlib.plan.settings import mesh_text, rules, schedule
from shardlib.plan.workloads.module import as_code
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.tables import aligned

_SHOWN = 0.0005
"""Fraction of the whole below which a part is left out."""


def describe(
    plans: Answer[Plan],
    levers: Sequence[Lever],
    cost: float | None,
    *,
    in_code: bool,
    width: int | None,
) -> str:
    """Returns an answer for a cluster of one kind as text.

    Args:
        plans: The answer.
        levers: Changes that would make the first plan faster or cheaper.
        cost: USD of the run; None if not known.
        in_code: Whether to show the first plan as code, not as settings.
        width: Most characters of a line of the ranking; None for any number.
    """
    best, cluster = plans.best, plans.best.cluster
    chips = f"{cluster.num_chips:,} {cluster.chip.full_name}" if cluster.chip else cluster.name
    first = f"Plan 1, for the config:\n{_indented_text(plans.fragment())}"
    if best.layout.stage > 1:
        cut = StageCut(plans.workload.num_layers, best.layout.stage, best.layout.chunks)
        first += f"\nLayers on stages: {repeats(cut.by_stage)}"
    if in_code:
        first = f"Plan 1, in code:\n{_indented_text(as_code(best, plans.workload))}"
    time = ["Time of a step", *_time_table(best.time)]
    memory = _memory_table(best.memory, capacity_bytes(cluster))
    priced = "" if cost is None else f", ${cost:,.0f} at ${plans.goal.price:g} an hour"
    summary = _outcome(plans, priced)
    if levers:
        summary += ["What would move it:", *_indented(map(str, levers))]
    return _joined(
        plans,
        _headline(plans, chips) + _odd_batch(plans.workload, cluster.num_devices),
        _ranking(plans, ("micro", "schedule", "remat"), lambda plan: _uses(plans, plan), width),
        first,
        "\n".join([*time, "Memory of a device at the peak", *memory]),
        "\n".join(summary),
    )


def describe_mixed(plans: Answer[MixedPlan], alone: Sequence[Alone], width: int | None) -> str:
    """Returns an answer for a cluster of several kinds as text. `alone` holds the best plan of each
    kind alone; `width` is as in `describe`."""
    best, cluster, tightest = plans.best, plans.best.cluster, plans.best.tightest
    chips = ", ".join(f"{k.num_chips:,} {k.chip.full_name}" for k in cluster.kinds if k.chip)
    broken_down = [
        f"Time of a step, {best.slowest.cluster.name} being the last",
        *_time_table(best.time),
        f"Memory of a device of {tightest.cluster.name} at the peak",
        *_memory_table(tightest.memory, capacity_bytes(tightest.cluster)),
    ]
    compared = _indented(_compared(plans, alone))
    return _joined(
        plans,
        _headline(plans, chips),
        _ranking(plans, ("microbatches", "remat"), lambda plan: _shared_uses(plans, plan), width),
        f"Plan 1, for the config:\n{_indented_text(plans.fragment())}",
        _kinds(best, examples(plans.workload)),
        "\n".join(broken_down),
        "\n".join([*_outcome(plans), "Compared with one kind alone:", *compared]),
    )


def _joined(plans: Answer[AnyPlan], *sections: str) -> str:
    parts = list(sections)
    if plans.asked:
        parts.append("Why not\n" + _indented_text("\n".join(map(str, plans.asked))))
    if plans.notes:
        parts.append("\n".join(plans.notes))
    return "\n\n".join(parts)


def _headline(plans: Answer[AnyPlan], chips: str) -> str:
    """Returns the question, such as `llama3-8b (8.03B parameters) on v5p-64 (32 TPU v5p), 512
    sequences = 4.19M tokens a step`, and what the search counted."""
    name, work, found = plans.name, plans.workload, plans.found
    if isinstance(work, TransformerWorkload):
        name += f" ({count(work.job.model.num_params)} parameters)"
    batch = f"{work.batch:,} {examples(work)}"
    if work.unit == "tokens":
        batch += f" = {count(work.tokens)} tokens"
    return (
        f"{name} on {plans.cluster.name} ({chips}), {batch} a step\n"
        f"{found.layouts:,} layouts can run, and {found.fitting:,} of them fit; of the plans for "
        f"these, {found.priced:,} were priced, and a lower bound excludes the others"
    )


def _odd_batch(work: Workload, devices: int) -> str:
    """Returns a line on a batch that few meshes divide, with its neighbours that all devices
    divide; nothing for another."""
    most = math.gcd(work.batch, devices)
    if most >= min(work.batch, devices):
        return ""
    below = work.batch // devices * devices
    near = [number for number in (below, below + devices) if number]
    each = work.tokens // work.batch
    choices = " or ".join(
        f"{n:,}" + (f" ({count(n * each)} tokens)" if work.unit == "tokens" else "") for n in near
    )
    return (
        f"\n{work.batch:,} {examples(work)} divide over {most} of the {devices:,} devices at most; "
        f"{choices} would divide over all"
    )


def _ranking(
    plans: Answer[AnyPlan],
    titles: Sequence[str],
    uses: Callable[[AnyPlan], Sequence[str]],
    width: int | None,
) -> str:
    """Returns the plans as a table, or as sentences if it were wider than `width`. `uses` gives a
    plan's cells under `titles`."""
    rows = [("", "mesh", "rules", *titles, "step", "MFU", "memory")]
    for number, plan in enumerate(plans.found.plans, 1):
        named = rules(plan.layout)
        rows.append(
            (
                str(number),
                mesh_text(plan.layout),
                named if isinstance(named, str) else f"{named['preset']}+sequence",
                *uses(plan),
                duration(plan.seconds),
                f"{plans.mfu(plan):.1%}" if plans.mfu(plan) else "-",
                gib(plan.memory.total),
            )
        )
    last = len(rows[0])
    numbers = (3,) if titles[0] == "micro" else ()
    lines = aligned(rows, right=(0, *numbers, last - 3, last - 2, last - 1))
    if width is not None and max(map(len, lines)) > width:
        lines = [_sentence(rows[0], row) for row in rows[1:]]
    return "\n".join(lines)


def _sentence(names: Sequence[str], row: Sequence[str]) -> str:
    number, *cells = row
    parts = [f"{name} {cell}" for name, cell in zip(names[1:], cells, strict=True) if cell != "-"]
    return f"{number}  {', '.join(parts)}"


def _uses(plans: Answer[Plan], plan: Plan) -> Sequence[str]:
    layers = plans.workload.num_layers
    micro = str(plan.layout.microbatches)
    return micro, schedule(plan.layout) or "-", plan.choice.summary(layers)


def _shared_uses(plans: Answer[MixedPlan], plan: MixedPlan) -> Sequence[str]:
    micro = " + ".join(_microbatches(share) for share in plan.shares)
    return micro, plan.choice.policy(plans.workload.num_layers)


def _time_table(time: StepTime) -> list[str]:
    """Returns the parts of a step as lines, longest first."""
    rows = [
        (PARTS[name], duration(seconds), f"{seconds / time.total:.1%}")
        for name, seconds in sorted(time.parts.items(), key=lambda item: -item[1])
        if seconds > _SHOWN * time.total
    ]
    return _indented(aligned(rows, right=(1, 2)))


def _memory_table(memory: Memory, capacity: float) -> list[str]:
    """Returns the memory of a device as lines, with fractions of its capacity."""
    held = [
        (name, gib(size), f"{size / capacity:.1%}")
        for name, size in vars(memory).items()
        if name != "host" and size > _SHOWN * memory.total
    ]
    held.append(("of " + gib(capacity), gib(memory.total), f"{memory.total / capacity:.1%}"))
    if memory.host:
        held.append(("on the host", gib(memory.host), ""))
    return _indented(aligned(held, right=(1, 2)))


def _outcome(plans: Answer[AnyPlan], priced: str = "") -> list[str]:
    """Returns lines on the time of the first plan, its uncertainty and its bottleneck."""
    best, error, work = plans.best, plans.error, plans.workload
    # A traced program multiplies as its model says, masked or not.
    is_causal = isinstance(work, TransformerWorkload) and work.job.causal
    counted = "; MFU counts attention as causal." if is_causal else "."
    low, high = best.seconds / (1 + error), best.seconds * (1 + error)
    lines = [
        f"A step takes {duration(best.seconds)}, between {duration(low)} and {duration(high)}: "
        f"{plans.error_source}.",
        f"{count(plans.rate)} {work.unit}/s, {count(plans.rate / plans.cluster.num_chips)} a chip"
        f"{counted}",
        f"Bottleneck: {PARTS[best.time.bottleneck]}, "
        f"{best.time.parts[best.time.bottleneck] / best.seconds:.0%} of the step.",
    ]
    if plans.tokens:
        lines.append(
            f"{count(plans.tokens)} {work.unit}: {duration(plans.run_seconds)}, "
            f"{plans.chip_hours:,.0f} chip-hours{priced}."
        )
    return lines


def _kinds(plan: MixedPlan, examples: str) -> str:
    rows = [("", "devices", "groups", "microbatches", "of", "busy", "waits", "memory")]
    for share in plan.shares:
        cluster, longest = share.cluster, plan.slowest.busy_seconds
        rows.append(
            (
                cluster.name,
                f"{cluster.num_devices:,}",
                f"{len(share.microbatches):,}",
                _microbatches(share),
                duration(share.microbatch_seconds),
                duration(share.busy_seconds),
                f"{1 - share.busy_seconds / longest:.1%}",
                f"{gib(share.memory.total)} of {gib(capacity_bytes(cluster))}",
            )
        )
    title = f"Groups by kind, {plan.rows} {examples} a microbatch"
    return "\n".join([title, *_indented(aligned(rows, right=(1, 2, 3, 4, 5, 6, 7)))])


def _microbatches(share: KindShare) -> str:
    """Returns the microbatches per group of a kind: `3`, or `3-4` if some groups take one more."""
    fewest, most = min(share.microbatches), max(share.microbatches)
    return str(most) if fewest == most else f"{fewest}-{most}"


def _compared(plans: Answer[MixedPlan], alone: Sequence[Alone]) -> list[str]:
    """Returns a comparison of the plan with the best plans on each kind alone."""
    lines, best = [], plans.best
    for one in alone:
        if one.plan is None:
            lines.append(f"{one.cluster.name} alone: no plan with this batch")
            continue
        faster = one.plan.seconds / best.seconds
        cost = best.seconds * plans.cluster.num_chips
        cost /= one.plan.seconds * one.cluster.num_chips
        verdict = f"mixing is {faster:.2f} times as fast" if faster > 1 else "mixing does not pay"
        lines.append(
            f"{one.cluster.name} alone: {duration(one.plan.seconds)} a step on "
            f"{mesh_text(one.plan.layout)}; {verdict}, {cost - 1:+.0%} chip-hours"
        )
    return lines


def _indented_text(text: str) -> str:
    """Returns indented lines."""
    return "\n".join(_indented(text.rstrip().splitlines()))


def _indented(lines: Iterable[str]) -> list[str]:
    return ["  " + line for line in lines]
