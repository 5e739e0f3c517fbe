"""Search on clusters of several kinds of GPUs, whose groups take unequal shares of a batch.

All groups along `data` have the same mesh of `fsdp`, `expert` and `tensor`, each on devices of one
kind. They run the same program: microbatches of the same number of rows under one remat policy. A
group of a faster kind takes more microbatches (`train.reduction.group_microbatches`), so that all
groups end together. Then their gradients are summed once over the network. A step takes

    max over kinds (microbatches x seconds of one)  +  the sum over all groups  +  the update

The search tries all meshes of a group, with all microbatch sizes and all choices of the workload.
It leaves out `stage` and `context`: groups that run unequal numbers of microbatches cannot be split
along them (see `shardlib.train.reduce.reduction`).
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator, Sequence

from shardlib.cost.costs import Memory, StepTime
from shardlib.cost.layout import Layout, divisors
from shardlib.cost.machine import fabric
from shardlib.cost.machine.constants import committed
from shardlib.cost.transformer import communication, computation
from shardlib.hardware import Cluster, MixedCluster
from shardlib.plan.problem import Choice, Plan, Workload
from shardlib.plan.search import BestPlans, Found, capacity_bytes, least_layers, may_fit
from shardlib.plan.workloads.transformer import TransformerWorkload


@dataclasses.dataclass(frozen=True)
class KindShare:
    """Share of a step on the devices of one kind."""

    cluster: Cluster
    microbatches: tuple[int, ...]
    """Microbatches of each of its groups, in order."""
    microbatch_seconds: float
    """Seconds of the gradients of one microbatch."""
    memory: Memory
    """Memory of one device at the peak."""

    @property
    def busy_seconds(self) -> float:
        """Seconds until its last group waits for the others."""
        return max(self.microbatches) * self.microbatch_seconds


@dataclasses.dataclass(frozen=True)
class MixedPlan:
    """One way to run a step on a mixed cluster, with what it costs."""

    cluster: MixedCluster
    layout: Layout
    """Layout in which `data` counts the groups of all kinds; `shares` holds their microbatches."""
    choice: Choice
    rows: int
    """Sequences or images of one microbatch of one group."""
    shares: tuple[KindShare, ...]
    """Shares by kind, in the order of the cluster's kinds."""
    time: StepTime
    """Time of a step, on the kind that ends last."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.time.total

    @property
    def group_microbatches(self) -> tuple[int, ...]:
        """Microbatches of each group along `data`, starting with the first kind."""
        return tuple(count for share in self.shares for count in share.microbatches)

    @property
    def slowest(self) -> KindShare:
        """The kind that the others wait for."""
        return max(self.shares, key=lambda share: share.busy_seconds)

    @property
    def tightest(self) -> KindShare:
        """The kind whose devices have the least memory to spare."""
        return min(
            self.shares, key=lambda share: capacity_bytes(share.cluster) - share.memory.total
        )

    @property
    def memory(self) -> Memory:
        """Memory of a device of the tightest kind."""
        return self.tightest.memory

    def as_plan(self) -> Plan:
        """Returns the parts shared by all kinds as the plan of the kind that ends last."""
        return Plan(self.slowest.cluster, self.layout, self.choice, self.time, self.memory)


@dataclasses.dataclass(frozen=True)
class Alone:
    """The best plan on one of the kinds alone."""

    cluster: Cluster
    plan: Plan | None
    """None if nothing fits."""


def search_mixed(
    workload: Workload, cluster: MixedCluster, *, top: int = 5, keep: Layout | None = None
) -> Found[MixedPlan]:
    """Returns the fastest plans on all devices of a mixed cluster. `keep` is a layout of one group,
    whose mesh alone is searched.

    Raises:
        ConfigError: If one of the kinds cannot multiply in the workload's precision.
    """
    tried = list(group_layouts(workload, cluster))
    if keep is not None:
        tried = [layout for layout in tried if layout.sizes == keep.sizes]
    fitting = [layout for layout in tried if _may_fit(workload, cluster, layout)]
    bounds = ((_bound(workload, cluster, layout), layout) for layout in fitting)
    best = BestPlans(top, _score)
    for bound, layout in sorted(bounds, key=lambda pair: pair[0]):
        if bound > best.limit:
            break
        for plan in _priced(workload, cluster, layout):
            best.offer(plan)
    return Found(best.ranked(), len(tried), len(fitting), best.offered)


def group_layouts(workload: Workload, cluster: MixedCluster) -> Iterator[Layout]:
    """Yields the layouts of one group, with the microbatches of all groups together.

    The degrees multiply to a divisor of the devices of each kind, so that no group spans two kinds.
    Parameters are sharded as far as the workload allows. On the fast links within a group that
    costs least, and unsharded parameters would also be summed whole.
    """
    most = math.gcd(*(kind.num_devices for kind in cluster.kinds))
    for size in divisors(most):
        for layout in _meshes(workload, size):
            variants = workload.variants(layout, together(cluster)[0])
            cut = max((variant.zero for variant in variants), default=3)
            for variant in variants:
                if variant.zero == cut and not workload.faults(variant):
                    for total in totals(workload, variant, cluster.num_devices // size):
                        yield dataclasses.replace(variant, microbatches=total)


def totals(workload: Workload, layout: Layout, groups: int) -> list[int]:
    """Returns the possible numbers of microbatches of a batch: at least one per group, each of
    whole rows on the devices that share it."""
    rows, left = divmod(workload.batch, layout.batch_shards)
    return [] if left else [count for count in divisors(rows) if count >= groups]


@functools.cache
def together(cluster: MixedCluster) -> tuple[Cluster, ...]:
    """Returns the kinds, each as if all hosts were of it: what a device sends, waits for and holds
    depends on the number of hosts."""
    return tuple(dataclasses.replace(kind, num_hosts=cluster.num_hosts) for kind in cluster.kinds)


def shared_out(
    workload: Workload, cluster: MixedCluster, layout: Layout, choice: Choice
) -> MixedPlan:
    """Returns the plan of a layout of `group_layouts` and a choice, whether it fits or not."""
    total = layout.microbatches
    groups = [kind.num_devices // layout.num_devices for kind in cluster.kinds]
    # The offload left out here waits for the gradients of all groups, once a step.
    without = dataclasses.replace(layout, offload_optimizer=False)
    times = [workload.time(without, choice, kind) for kind in together(cluster)]
    each = [(time.total - time.waiting - time.optimizer) / total for time in times]
    counts = share_out(each, groups, total)
    held = [workload.memory(layout, choice, kind) for kind in together(cluster)]
    shares = tuple(map(KindShare, cluster.kinds, counts, each, held))
    last = max(range(len(shares)), key=lambda kind: shares[kind].busy_seconds)
    share = max(counts[last]) / total
    parts = {name: share * seconds for name, seconds in times[last].parts.items()}
    del parts["waiting"]
    parts["data"] += reduce_seconds(workload, cluster, layout, choice)
    parts |= _update(workload, cluster, layout, choice, times)
    parts["offload"] += share * times[last].offload
    waits = max(time.waiting / (time.total - time.waiting) for time in times)
    return MixedPlan(
        cluster,
        dataclasses.replace(layout, data=sum(groups), microbatches=1),
        choice,
        workload.batch // total,
        shares,
        StepTime(**parts, waiting=waits * sum(parts.values())),
    )


def reduce_seconds(
    workload: Workload, cluster: MixedCluster, layout: Layout, choice: Choice
) -> float:
    """Returns the seconds of the float32 gradient sum over all groups, once a step.

    Every device sums its own part of the gradients with its peers in the other groups, and no
    computation is left to hide it. In a ring each member waits for its neighbour, so the kind with
    the slowest links sets the pace. Source of the traffic: Thakur et al. 2005, "Optimization of
    Collective Communication Operations in MPICH", as in `shardlib.cost.machine.fabric`.
    """
    if isinstance(workload, TransformerWorkload):
        device = computation.Device(workload.job, layout, workload.software)
        cut = 1 if layout.zero == 1 else layout.fsdp
        summed = communication.local_weights(device).total / cut * workload.job.gradient_bytes
    else:
        summed = workload.memory(layout, choice, together(cluster)[0]).gradients
    whole = dataclasses.replace(layout, data=cluster.num_devices // layout.num_devices)
    constants = getattr(workload, "constants", None) or committed()
    return max(
        fabric.links(kind, whole, constants)["data"].all_reduce(summed)
        for kind in together(cluster)
    )


def share_out(
    seconds: Sequence[float], groups: Sequence[int], total: int
) -> tuple[tuple[int, ...], ...]:
    """Returns the part of `total` microbatches that each group of each kind takes so that all end
    together. It equals `shardlib.train.reduce.uneven.balance`, for many groups at once. Seconds of
    a microbatch and groups are by kind; `total` is at least the number of groups."""
    active, left, pace = list(range(len(seconds))), total, 0.0
    while True:
        pace = left / sum(groups[kind] / seconds[kind] for kind in active)
        slow = [kind for kind in active if pace < seconds[kind]]
        if not slow or len(slow) == len(active):
            break
        active = [kind for kind in active if kind not in slow]
        left -= sum(groups[kind] for kind in slow)
    # One less than fits, to allow for rounding. The rest is given one by one to the group that ends
    # it first.
    counts = [
        [max(1, int(pace / each) - 1) if kind in active else 1] * number
        for kind, (each, number) in enumerate(zip(seconds, groups, strict=True))
    ]
    ends = [
        ((count + 1) * seconds[kind], kind, group)
        for kind, own in enumerate(counts)
        for group, count in enumerate(own)
    ]
    heapq.heapify(ends)
    for _ in range(total - sum(map(sum, counts))):
        _, kind, group = ends[0]
        counts[kind][group] += 1
        heapq.heapreplace(ends, ((counts[kind][group] + 1) * seconds[kind], kind, group))
    return tuple(map(tuple, counts))


def _meshes(workload: Workload, size: int) -> Iterator[Layout]:
    """Yields the meshes of a group of `size` devices."""
    for tensor in workload.degrees("tensor", size):
        for expert in workload.degrees("expert", size // tensor):
            fsdp, left = divmod(size, tensor * expert)
            if not left and fsdp in workload.degrees("fsdp", fsdp):
                yield Layout(fsdp=fsdp, expert=expert, tensor=tensor)


def _may_fit(workload: Workload, cluster: MixedCluster, layout: Layout) -> bool:
    """Returns whether the choice with the least memory fits every kind."""
    return all(may_fit(workload, layout, kind, capacity_bytes(kind)) for kind in together(cluster))


def _update(
    workload: Workload,
    cluster: MixedCluster,
    layout: Layout,
    choice: Choice,
    times: Sequence[StepTime],
) -> dict[str, float]:
    """Returns the seconds of the update on the kind that takes longest for it, and of the transfers
    of the optimizer state from and to the hosts.
    """
    if not layout.offload_optimizer:
        return {"optimizer": max(time.optimizer for time in times), "offload": 0.0}
    moved_times = [workload.time(layout, choice, kind) for kind in together(cluster)]
    moved = (new.offload - old.offload for new, old in zip(moved_times, times, strict=True))
    pairs = zip((time.optimizer for time in moved_times), moved, strict=True)
    return dict(zip(("optimizer", "offload"), max(pairs, key=sum), strict=True))


def _bound(workload: Workload, cluster: MixedCluster, layout: Layout) -> float:
    """Returns a lower bound of the seconds with any choice: groups that end exactly together."""
    total, rate = layout.microbatches, 0.0
    for kind in together(cluster):
        seconds = workload.bound(layout, kind, total) / total
        if seconds <= 0:
            return 0.0
        rate += kind.num_devices / layout.num_devices / seconds
    return total / rate


def _priced(workload: Workload, cluster: MixedCluster, layout: Layout) -> Iterator[MixedPlan]:
    """Yields the plans of a layout that fit, one per choice. A choice with ranges of layers takes
    the fewest that must recompute for the step to fit every kind."""
    for choice in workload.choices(layout, together(cluster)[0]):
        fewest = [
            least_layers(workload, layout, choice, kind, capacity_bytes(kind))
            for kind in together(cluster)
        ]
        if all(one is not None for one in fewest):
            least = max((one for one in fewest if one), key=lambda one: one.layers or 0)
            yield shared_out(workload, cluster, layout, least)


def _score(plan: MixedPlan) -> tuple[float, ...]:
    """Returns the ranking key of a plan: time, then simplicity."""
    axes = sum(size > 1 for size in plan.layout.sizes)
    return plan.seconds, axes, sum(plan.group_microbatches), plan.choice.loss_chunks
