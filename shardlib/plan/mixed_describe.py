"""Text reports of plans for mixed clusters."""

from typing import TYPE_CHECKING

from shardlib.humanize import duration, gib
from shardlib.plan.describe import (
    each,
    examples,
    headline,
    indented,
    memory_table,
    outcome,
    time_table,
)
from shardlib.plan.mixed_search import KindShare, MixedPlan
from shardlib.plan.search import capacity_bytes
from shardlib.plan.settings import mesh_text, rules
from shardlib.tables import aligned

if TYPE_CHECKING:
    from shardlib.plan.mixed_result import MixedPlans


def describe_mixed(plans: "MixedPlans") -> str:
    """Returns the answer as text."""
    best = plans.best
    sections = [
        _headline(plans),
        _ranking(plans),
        f"Plan 1, for the config:\n{indented(plans.fragment())}",
        _kinds(best, examples(plans.workload)),
        _broken_down(best),
        _summary(plans),
    ]
    if plans.asked:
        sections.append("Why not\n" + indented("\n".join(map(str, plans.asked))))
    return "\n\n".join([*sections, "\n".join(plans.notes)])


def _headline(plans: "MixedPlans") -> str:
    found, cluster = plans.found, plans.cluster
    chips = (f"{k.num_chips:,} {k.chip.full_name}" for k in cluster.kinds if k.chip)
    head = headline(plans.name, plans.workload, f"{cluster.name} ({', '.join(chips)})")
    tried = (
        f"{found.layouts:,} layouts can be run, {found.fitting:,} of them fit; "
        f"{found.priced:,} plans were priced, and a bound rules out the others"
    )
    return f"{head}\n{tried}"


def _ranking(plans: "MixedPlans") -> str:
    rows = [("", "mesh", "rules", "microbatches", "remat", "step", "MFU", "memory")]
    for number, plan in enumerate(plans.found.plans, 1):
        named = rules(plan.layout)
        rows.append(
            (
                str(number),
                mesh_text(plan.layout),
                named if isinstance(named, str) else f"{named['preset']}+sequence",
                " + ".join(_microbatches(share) for share in plan.shares),
                plan.choice.policy(plans.workload.num_layers),
                duration(plan.seconds),
                f"{plans.mfu(plan):.1%}" if plans.mfu(plan) else "-",
                gib(plan.memory.total),
            )
        )
    return "\n".join(aligned(rows, right=(0, 5, 6, 7)))


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
    return "\n".join([title, *each("  ", aligned(rows, right=(1, 2, 3, 4, 5, 6, 7)))])


def _microbatches(share: KindShare) -> str:
    """Returns the microbatches per group of a kind: `3`, or `3-4` if some groups take one more."""
    fewest, most = min(share.microbatches), max(share.microbatches)
    return str(most) if fewest == most else f"{fewest}-{most}"


def _broken_down(plan: MixedPlan) -> str:
    tightest = plan.tightest
    lines = [f"Time of a step, {plan.slowest.cluster.name} being the last", *time_table(plan.time)]
    lines.append(f"Memory of a device of {tightest.cluster.name} at the peak")
    return "\n".join([*lines, *memory_table(tightest.memory, capacity_bytes(tightest.cluster))])


def _summary(plans: "MixedPlans") -> str:
    return "\n".join(
        [*outcome(plans), "Compared with one kind alone:", *each("  ", _compared(plans))]
    )


def _compared(plans: "MixedPlans") -> list[str]:
    """Returns a comparison of the plan with the best plans on each kind alone."""
    lines, best = [], plans.best
    for one in plans.alone:
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
