"""Answers of `plan` for a cluster of several kinds of GPUs, and its errors without a plan."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from shardlib.cost.layout import Layout
from shardlib.errors import MeshError, ModelError
from shardlib.hardware import MixedCluster
from shardlib.humanize import gib
from shardlib.mesh import MeshSpec
from shardlib.plan.answer import Answer, beyond_default_share, explained, relaxing, too_slow
from shardlib.plan.mixed_search import (
    Alone,
    KindShare,
    MixedPlan,
    group_layouts,
    search_mixed,
    shared_out,
    together,
)
from shardlib.plan.problem import Workload, examples
from shardlib.plan.report import describe_mixed
from shardlib.plan.request import Question
from shardlib.plan.search import Found, capacity_bytes, leanest, search
from shardlib.plan.settings import Settings, settings
from shardlib.plan.why_not import WhyNot, compared, read_mesh

_NEAR = 20
"""Batches to try on each side of a batch that cannot be divided."""


@dataclasses.dataclass(frozen=True)
class MixedPlans(Answer[MixedPlan]):
    """The best plans for a model on a mixed cluster; `str()` gives the report."""

    found: Found[MixedPlan]

    @property
    def cluster(self) -> MixedCluster:
        """Cluster that the plans are for."""
        return self.best.cluster

    @functools.cached_property
    def alone(self) -> tuple[Alone, ...]:
        """Best plan of each kind alone, with the same batch and meshes of any axes; fastest
        first."""
        parts = [
            Alone(kind, next(iter(search(self.workload, kind, top=1).plans), None))
            for kind in self.cluster.kinds
        ]
        return tuple(sorted(parts, key=lambda one: one.plan.seconds if one.plan else math.inf))

    def why_not(self, mesh: MeshSpec) -> WhyNot:
        """Returns the reasons why a mesh is not the plan.

        Raises:
            MeshError: If the mesh cannot be read or does not fill the devices.
        """
        return _why_not(self.workload, self.cluster, self.best, mesh)

    def _settings(self, plan: MixedPlan) -> Settings:
        batch, shards = self.workload.batch, plan.layout.batch_shards
        counts = ",".join(map(str, plan.group_microbatches))
        by_key = settings(plan.as_plan(), self.workload.num_layers, batch=batch)
        by_key["train.reduction.group_microbatches"] = f"[{counts}]"
        # Only the first process writes to JAX's cache, under a key that is the same for all kinds.
        # The others would run code compiled for its GPUs.
        by_key["train.compilation_cache"] = "null"
        if batch % shards:
            # Groups take equal parts of an evaluation batch.
            by_key["eval.global_batch"] = max(batch // shards, 1) * shards
        return by_key

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        alone = [
            {"cluster": one.cluster.name, "seconds": one.plan.seconds if one.plan else None}
            for one in self.alone
        ]
        return {**super().to_dict(), "alone": alone}

    def _plan_facts(self, plan: MixedPlan) -> dict[str, Any]:
        return {
            **super()._plan_facts(plan),
            "rows_per_microbatch": plan.rows,
            "kinds": [_share(share) for share in plan.shares],
        }

    def text(self, width: int | None = None) -> str:
        """Returns the report; `width` is the most characters of a line of its ranking."""
        return describe_mixed(self, self.alone, width)

    def __str__(self) -> str:
        return self.text()


def answer_mixed(
    name: str,
    workload: Workload,
    question: Question,
    *,
    notes: Sequence[str] = (),
    kept: frozenset[str] = frozenset(),
) -> MixedPlans:
    """Returns the best plans of a workload on the mixed cluster of a question.

    Raises:
        MeshError: If nothing fits or is fast enough, or a mesh to explain is malformed.
        ModelError: If the model has state of its own.
    """
    cluster, goal, top = question.mixed, question.goal, question.top
    assert cluster is not None
    _check_stateless(name, workload, cluster)
    found, workload, relaxed = relaxing(workload, lambda work: search_mixed(work, cluster, top=top))
    if not found.plans:
        raise _nothing_found(name, workload, cluster)
    best = found.plans[0]
    if best.seconds > goal.seconds(workload.tokens):
        raise too_slow(name, workload, cluster, goal, best.seconds)
    asked = explained(question.meshes, lambda mesh: _why_not(workload, cluster, best, mesh))
    held = ([(s.cluster, s.memory.total) for s in plan.shares] for plan in found.plans)
    notes = (*notes, *relaxed, *_of_jax(cluster), *beyond_default_share(held))
    return MixedPlans(name, workload, goal, found, asked, notes, kept)


def _of_jax(cluster: MixedCluster) -> list[str]:
    """Returns known facts about JAX programs on GPUs of several kinds.

    Sources: github.com/jax-ml/jax issues 1509, 2721 and 13203, jax/_src/compiler.py and
    cache_key.py; github.com/openxla/xla pull requests 13108 and 14968.
    """
    return [
        f"Start the processes on {cluster.kinds[0].name} first, and the others in the order of the "
        "name: groups lie along data in process order.",
        "A process must see GPUs of one kind: XLA compiles one executable for them, and refuses to "
        "run it on another kind (jax issues 2721, 13203). Each process compiles the same program "
        "for its own GPUs, but XLA is made for identical devices (jax issue 1509), and a run over "
        "several kinds is untested here.",
        "Set XLA_FLAGS=--xla_gpu_shard_autotuning=false, or processes tune kernels for each other "
        "(openxla/xla pull request 13108). Keep jax_share_binary_between_hosts and the compilation "
        "cache off: both give every process what the first one compiled.",
        "The error was measured on runs of one kind: no published run on several kinds is known.",
    ]


def _check_stateless(name: str, workload: Workload, cluster: MixedCluster) -> None:
    variants = workload.variants(Layout(), cluster.kinds[0])
    if variants and not any(variant.stateless for variant in variants):
        raise ModelError(
            f"{name} updates state of its own as it runs, and groups with unequal shares would "
            f"each hold a different one.\n  Plan for one kind alone: --on {cluster.kinds[0].name}"
        )


def _why_not(workload: Workload, cluster: MixedCluster, best: MixedPlan, mesh: MeshSpec) -> WhyNot:
    config = read_mesh(mesh, cluster.num_devices)
    layout, text = Layout.of(config.sizes), str(config)
    group = dataclasses.replace(layout, data=1)
    faults = [
        f"{axis}={layout.size(axis)}: groups that take unequal shares cannot split it"
        for axis in ("stage", "context")
        if layout.size(axis) > 1
    ]
    faults += [
        f"groups of {group.num_devices} devices do not divide the {kind.num_devices} of {kind.name}"
        for kind in cluster.kinds
        if kind.num_devices % group.num_devices
    ]
    faults += workload.faults(group)
    if faults:
        return WhyNot(text, tuple(faults))
    outcome = search_mixed(workload, cluster, top=1, keep=group)
    if not outcome.layouts:
        reason = f"{layout.data} groups cannot divide a batch of {workload.batch}"
        return WhyNot(text, (reason,))
    if not outcome.plans:
        return WhyNot(
            text, (f"does not fit: {_needs(_leanest(workload, cluster, group), workload)}",)
        )
    return compared(text, outcome.plans[0].as_plan(), best.as_plan())


def _leanest(
    workload: Workload, cluster: MixedCluster, keep: Layout | None = None
) -> MixedPlan | None:
    """Returns the plan with the least memory, over all meshes of groups or one mesh; None if none
    can run."""
    tried = (
        shared_out(workload, cluster, layout, leanest(workload, layout, together(cluster)[0]))
        for layout in group_layouts(workload, cluster)
        if keep is None or layout.sizes == keep.sizes
    )
    return min(tried, key=lambda plan: (plan.memory.total, plan.rows), default=None)


def _needs(plan: MixedPlan | None, workload: Workload) -> str:
    assert plan is not None, "a layout that does not fit can still run"
    share = plan.tightest
    return (
        f"a device of {share.cluster.name} needs {gib(share.memory.total)} and has "
        f"{gib(capacity_bytes(share.cluster))}, even with remat {plan.choice.remat} and "
        f"{plan.rows} {examples(workload)} a microbatch"
    )


def _nothing_found(name: str, workload: Workload, cluster: MixedCluster) -> MeshError:
    least = _leanest(workload, cluster)
    if least is None:
        return _nothing_divides(name, workload, cluster)
    size = math.gcd(*(kind.num_devices for kind in cluster.kinds))
    return MeshError(
        f"{name} does not fit {cluster.name}: with the leanest mesh, {least.layout}, "
        f"{_needs(least, workload)}.\n"
        f"  A group has at most {size} devices, all of one kind, and no axis stage or context: "
        "plan for one kind alone, or take kinds with more memory or more devices."
    )


def _nothing_divides(name: str, workload: Workload, cluster: MixedCluster) -> MeshError:
    """Returns the error for a batch without whole rows for each group, with the nearest batch that
    can be divided."""
    near = (workload.batch + step * side for step in range(1, _NEAR + 1) for side in (-1, 1))
    devices = {kind.num_devices for kind in cluster.kinds}
    groups = cluster.num_devices // math.gcd(*devices)
    tried = (*near, *(groups * factor for factor in range(1, _NEAR + 1)), cluster.num_devices)
    can = next(
        (
            batch
            for batch in sorted(set(tried), key=lambda b: (abs(b - workload.batch), b))
            if batch > 0 and any(True for _ in group_layouts(workload.with_batch(batch), cluster))
        ),
        None,
    )
    hint = "Take other dims" if can is None else f"Take a batch of {can}"
    return MeshError(
        f"{name} cannot be divided over {cluster.name}: there are at least {groups} groups of "
        f"devices, and a batch of {workload.batch} cannot give each of them a whole microbatch.\n"
        f"  {hint}, or another number of devices."
    )


def _share(share: KindShare) -> dict[str, Any]:
    return {
        "cluster": share.cluster.name,
        "devices": share.cluster.num_devices,
        "groups": len(share.microbatches),
        "microbatches": list(share.microbatches),
        "microbatch_seconds": share.microbatch_seconds,
        "busy_seconds": share.busy_seconds,
        "memory": vars(share.memory) | {"total": share.memory.total},
        "capacity": capacity_bytes(share.cluster),
    }
