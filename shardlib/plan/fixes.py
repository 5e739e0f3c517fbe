"""Fixes for a step that does not fit: the changes that cost the least time."""

import dataclasses
from collections.abc import Iterator

from shardlib.cost.layout import AXES, Layout
from shardlib.hardware import Cluster
from shardlib.humanize import duration, gib
from shardlib.plan.objective import next_larger
from shardlib.plan.problem import Choice, Plan, Workload
from shardlib.plan.search import (
    candidates,
    capacity_bytes,
    leanest,
    least_layers,
    of_layout,
    score,
    search,
)
from shardlib.plan.settings import Settings, settings, to_overrides


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change after which a step fits."""

    settings: Settings
    """Config keys to set."""
    plan: Plan
    """The plan after the change."""
    before: float
    """Predicted seconds of the step without the change, as if it fitted."""
    on: str | None = None
    """The larger cluster that it needs; None for the same one."""

    @property
    def slower(self) -> float:
        """Predicted relative change of the step time; negative if it gets faster."""
        return self.plan.seconds / self.before - 1

    @property
    def memory_bytes(self) -> float:
        """Predicted peak memory of a device after the change."""
        return self.plan.memory.total

    @property
    def change(self) -> str:
        """The change as words of the command line."""
        larger = [] if self.on is None else [f"--on {self.on}"]
        return " ".join([*larger, *to_overrides(self.settings)])

    def cost(self, memory_bytes: float) -> str:
        """Returns the memory and the predicted time of a step."""
        seconds = duration(self.plan.seconds)
        return f"{gib(memory_bytes)}, {seconds} a step ({self.slower:+.0%})"

    def __str__(self) -> str:
        return f"{self.change}: {self.cost(self.memory_bytes)}"


def cheapest_fixes(
    workload: Workload,
    layout: Layout,
    choice: Choice,
    cluster: Cluster,
    *,
    count: int = 3,
    over_bytes: float = 0.0,
) -> list[Fix]:
    """Returns the changes that make a step fit at the lowest cost in time by the cost model,
    fastest first. Each is of a different kind: one config key, then a key with more microbatches,
    then another mesh alone or with other keys, and, if nothing else helps, a larger cluster.

    Args:
        workload: What is trained.
        layout: Layout of the step, with its microbatches.
        choice: Other choices of the config.
        cluster: Cluster that the step does not fit.
        count: Most fixes to return.
        over_bytes: Bytes by which the compiled step exceeds the prediction of `workload.memory`, if
            known; fixes then leave as much room. If negative, a mesh alone may exceed the memory by
            as much.
    """
    room = capacity_bytes(cluster) - max(over_bytes, 0.0)
    as_is = _plan(workload, cluster, layout, choice)
    plans = (
        *_one_key(workload, as_is, room),
        *_meshes_alone(workload, as_is, room - min(over_bytes, 0.0)),
        *_other_meshes(workload, as_is, room),
    )
    changes = ((_changed(workload, as_is, plan), plan) for plan in plans)
    by_keys = {str(keys): Fix(keys, plan, as_is.seconds) for keys, plan in changes if keys}
    fixes = list(by_keys.values())
    fixes.sort(key=lambda fix: (score(fix.plan)[0], len(fix.settings)))
    kinds: dict[tuple[str, ...], Fix] = {}
    for fix in fixes:
        # A change of more keys is redundant if a subset of them is enough.
        if not any(set(kind) <= set(_kind(fix)) for kind in kinds):
            kinds[_kind(fix)] = fix
    chosen = list(kinds.values())[:count]
    chosen += [fix for fix in fixes if fix not in chosen][: count - len(chosen)]
    if len(chosen) < count and (larger := next_larger(cluster)) is not None:
        chosen += _on_larger(workload, larger, as_is)
    return sorted(chosen[:count], key=lambda fix: fix.plan.seconds)


def smallest(workload: Workload, cluster: Cluster, keep: Layout | None = None) -> Plan | None:
    """Returns the plan with the least memory on a cluster, or on one of its meshes, whether it fits
    or not; None if nothing can run."""
    best: tuple[float, Layout, Choice] | None = None
    for candidate in candidates(workload, cluster):
        if keep is not None and candidate.layout.sizes != keep.sizes:
            continue
        for number in {candidate.microbatches[0], candidate.microbatches[-1]}:
            layout = candidate.with_microbatches(number)
            choice = leanest(workload, layout, cluster)
            held = workload.memory(layout, choice, cluster).total
            if best is None or held < best[0]:
                best = held, layout, choice
    if best is None:
        return None
    _, layout, choice = best
    return _plan(workload, cluster, layout, choice)


def _plan(workload: Workload, cluster: Cluster, layout: Layout, choice: Choice) -> Plan:
    time = workload.time(layout, choice, cluster)
    return Plan(cluster, layout, choice, time, workload.memory(layout, choice, cluster))


def _one_key(workload: Workload, as_is: Plan, room: float) -> Iterator[Plan]:
    """Yields plans on the same mesh that fit: other choices, other uses of its axes, more
    microbatches."""
    cluster, now = as_is.cluster, as_is.layout
    relaxed = workload.relaxed()
    others = workload.variants(now, cluster)
    layouts = [now, *(v for v in others if v.microbatches in _microbatches(workload, v))]
    more = (n for n in _microbatches(workload, now) if n > now.microbatches)
    layouts += [dataclasses.replace(now, microbatches=n) for n in more]
    for layout in dict.fromkeys(layouts):
        for choice in (as_is.choice, *relaxed.choices(layout, cluster)):
            least = least_layers(relaxed, layout, choice, cluster, room)
            if least is not None and _steps(as_is, layout, least) <= 2:
                yield _plan(relaxed, cluster, layout, least)


def _meshes_alone(workload: Workload, as_is: Plan, room: float) -> Iterator[Plan]:
    """Yields the plan of another mesh, with all else as it is, that fits and takes least time."""
    cluster, now = as_is.cluster, as_is.layout
    alike = (
        dataclasses.replace(now, **dict(zip(AXES, candidate.layout.sizes, strict=True)))
        for candidate in candidates(workload, cluster)
        if now.microbatches in candidate.microbatches
        and candidate.layout.stage == now.stage
        and candidate.layout.sizes != now.sizes
    )
    fitting = (
        layout
        for layout in dict.fromkeys(alike)
        if workload.memory(layout, as_is.choice, cluster).fits(room)
    )
    plans = (_plan(workload, cluster, layout, as_is.choice) for layout in fitting)
    best = min(plans, key=lambda plan: plan.seconds, default=None)
    if best is not None:
        yield best


def _other_meshes(workload: Workload, as_is: Plan, room: float) -> Iterator[Plan]:
    others = search(workload, as_is.cluster, top=3)
    yield from (plan for plan in others.plans if plan.memory.fits(room))


def _on_larger(workload: Workload, cluster: Cluster, as_is: Plan) -> list[Fix]:
    plans = search(workload, cluster, top=1).plans
    return [
        Fix(_changed(workload, as_is, plan), plan, as_is.seconds, cluster.name) for plan in plans
    ]


def _steps(as_is: Plan, layout: Layout, choice: Choice) -> int:
    """Returns the number of settings in which a plan of the same mesh differs."""
    changed = sum(
        getattr(layout, name) != getattr(as_is.layout, name)
        for name in ("microbatches", "zero", "sequence_parallel", "chunks", "offload_optimizer")
    )
    same = as_is.choice
    remat = (choice.remat, choice.num_layers) != (same.remat, same.num_layers)
    return (
        changed
        + remat
        + (choice.moments != same.moments)
        + (choice.loss_chunks != same.loss_chunks)
    )


def _changed(workload: Workload, as_is: Plan, plan: Plan) -> Settings:
    """Returns the config keys in which two plans differ, with their new values."""
    old, new = (
        settings(one, workload.num_layers, sums_once=workload.sums_once(one.layout))
        for one in (as_is, plan)
    )
    return {key: value for key, value in new.items() if old.get(key) != value}


def _kind(fix: Fix) -> tuple[str, ...]:
    """Returns the kind of a fix: its keys, or the mesh alone or with all that depends on it."""
    if "mesh" not in fix.settings:
        return tuple(fix.settings)
    return ("mesh",) if len(fix.settings) == 1 else ("mesh", "others")


def _microbatches(workload: Workload, layout: Layout) -> set[int]:
    """Returns the numbers of microbatches that can run."""
    plain = dataclasses.replace(layout, microbatches=1, chunks=1)
    alike = (c for c in of_layout(workload, plain) if c.layout.chunks == layout.chunks)
    return {n for candidate in alike for n in candidate.microbatches}
