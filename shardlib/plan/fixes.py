"""What makes a step fit that does not: the changes that cost least time."""

import dataclasses
from collections.abc import Iterable, Iterator

from shardlib.hardware import Cluster
from shardlib.plan.candidates import candidates, of_layout
from shardlib.plan.layout import Layout
from shardlib.plan.objective import next_larger
from shardlib.plan.problem import Choice, Plan, Workload
from shardlib.plan.search import capacity_bytes, least_layers, mesh_of, score, search
from shardlib.plan.settings import Settings, settings, to_overrides


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change after which a step fits."""

    settings: Settings
    """Keys of the config to set; empty where only the cluster changes."""
    plan: Plan
    """The step after it."""
    before: float
    """Predicted seconds of the step as it was, had it fitted."""

    @property
    def slower(self) -> float:
        """Predicted change of the step time, as a fraction; negative where it gets faster."""
        return self.plan.seconds / self.before - 1

    @property
    def memory_bytes(self) -> float:
        """Predicted peak of a device after it."""
        return self.plan.memory.total

    def __str__(self) -> str:
        what = " ".join(to_overrides(self.settings)) or f"--on {self.plan.cluster.name}"
        return (
            f"{what}: {self.memory_bytes / 2**30:.1f} GiB, "
            f"{self.plan.seconds:.3g} s a step ({self.slower:+.0%})"
        )


def cheapest_fixes(
    workload: Workload,
    layout: Layout,
    choice: Choice,
    cluster: Cluster,
    *,
    count: int = 3,
    over_bytes: float = 0.0,
) -> list[Fix]:
    """Returns the changes that make a step fit and cost least time by the cost model, fastest
    first, each of another kind: one key of the config, then a key beside more microbatches, then
    another mesh, and when nothing else helps a larger cluster.

    Args:
        workload: What is trained.
        layout: How it is split, with its microbatches.
        choice: What else the config says.
        cluster: What it does not fit.
        count: How many at most.
        over_bytes: By how much the compiled step exceeds what `workload.memory` predicts, if it is
            known; fixes then leave as much room.
    """
    room = capacity_bytes(cluster) - max(over_bytes, 0.0)
    as_is = _plan(workload, cluster, layout, choice)
    plans = (*_one_key(workload, as_is, room), *_other_meshes(workload, as_is, room))
    by_keys = {str(changed): (changed, plan) for changed, plan in _changes(workload, as_is, plans)}
    fixes = [Fix(changed, plan, as_is.seconds) for changed, plan in by_keys.values()]
    fixes.sort(key=lambda fix: (score(fix.plan)[0], len(fix.settings)))
    kinds: dict[tuple[str, ...], Fix] = {}
    for fix in fixes:
        # A change of more keys is no news where some of them are enough.
        if not any(set(kind) <= set(_kind(fix)) for kind in kinds):
            kinds[_kind(fix)] = fix
    found = list(kinds.values())[:count]
    found += [fix for fix in fixes if fix not in found][: count - len(found)]
    if len(found) < count and (larger := next_larger(cluster)) is not None:
        found += _on_larger(workload, larger, as_is.seconds)
    return sorted(found[:count], key=lambda fix: fix.plan.seconds)


def smallest(workload: Workload, cluster: Cluster, keep: Layout | None = None) -> Plan | None:
    """Returns the plan of a cluster, or of one of its meshes, that holds least, whether it fits or
    not; None where nothing can be run."""
    best: tuple[float, Layout, Choice] | None = None
    for candidate in candidates(workload, cluster):
        if keep is not None and mesh_of(candidate.layout) != mesh_of(keep):
            continue
        for number in {candidate.microbatches[0], candidate.microbatches[-1]}:
            layout = candidate.with_microbatches(number)
            choice = workload.leanest(layout, cluster)
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
    """Plans on the same mesh that fit: other choices, other uses of its axes, more microbatches."""
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


def _other_meshes(workload: Workload, as_is: Plan, room: float) -> Iterator[Plan]:
    found = search(workload, as_is.cluster, top=3)
    yield from (plan for plan in found.plans if plan.memory.fits(room))


def _on_larger(workload: Workload, cluster: Cluster, before: float) -> list[Fix]:
    return [Fix({}, plan, before) for plan in search(workload, cluster, top=1).plans]


def _steps(as_is: Plan, layout: Layout, choice: Choice) -> int:
    """How many things a plan of the same mesh changes."""
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


def _changes(
    workload: Workload, as_is: Plan, plans: Iterable[Plan]
) -> Iterator[tuple[Settings, Plan]]:
    for plan in plans:
        if changed := _changed(workload, as_is, plan):
            yield changed, plan


def _changed(workload: Workload, as_is: Plan, plan: Plan) -> Settings:
    """The keys of the config that lead from one plan to another."""
    old = settings(as_is, workload.num_layers)
    new = settings(plan, workload.num_layers)
    return {key: value for key, value in new.items() if old.get(key) != value}


def _kind(fix: Fix) -> tuple[str, ...]:
    """What a fix changes: keys, or the mesh and all that goes with it."""
    return ("mesh",) if "mesh" in fix.settings else tuple(fix.settings)


def _microbatches(workload: Workload, layout: Layout) -> set[int]:
    """Their numbers that can be run."""
    plain = dataclasses.replace(layout, microbatches=1, chunks=1)
    alike = (c for c in of_layout(workload, plain) if c.layout.chunks == layout.chunks)
    return {n for candidate in alike for n in candidate.microbatches}
