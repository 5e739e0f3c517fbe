"""The search for the fastest plans on a given cluster: exhaustive, with pruning that loses none.

Tried is every mesh whose degrees the model and the batch divide by, with every number of
microbatches and of pipeline chunks that can be run and every choice of the workload. A layout is
left out when

- not even its leanest choice fits the memory, with the fewest and with the most microbatches, or
- the least time that it could take (`Workload.bound`) is more than that of the plans found before.

Layouts are tried in the order of those bounds, so that good plans come first and most of the rest
is never priced. What is tried for a layout are its choices, and of ranges of layers the fewest that
must recompute for the step to fit.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator

from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.plan.candidates import Candidate, candidates
from shardlib.plan.layout import AXES, Layout
from shardlib.plan.measured import MeasuredCluster
from shardlib.plan.problem import Choice, Plan, Workload

_NUMERICS = 1.02
"""What a plan that stores a moment in bfloat16 must be faster by: it changes the numbers."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found."""

    plans: tuple[Plan, ...]
    """The best plan of each of the best meshes, best first; empty when nothing fits."""
    layouts: int
    """Layouts that can be run, without their microbatches."""
    fitting: int
    """Those of them whose leanest choice fits."""
    priced: int
    """Steps whose time was computed."""


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    top: int = 5,
    keep: Layout | None = None,
    microbatches: int | None = None,
) -> Found:
    """Returns the fastest plans on all devices of a cluster.

    Args:
        workload: What is trained.
        cluster: TPU or GPU devices, or CPU devices whose speed was measured.
        top: How many meshes to return a plan of.
        keep: A layout whose mesh alone is searched; None for all.
        microbatches: Their number; None for any.

    Raises:
        MeshError: If the chip of the cluster is not known.
    """
    capacity = capacity_bytes(cluster)
    tried = list(candidates(workload, cluster))
    if keep is not None:
        tried = [c for c in tried if mesh_of(c.layout) == mesh_of(keep)]
    if microbatches is not None:
        tried = [c.only(microbatches) for c in tried if microbatches in c.microbatches]
    fitting = [c for c in tried if _may_fit(workload, cluster, c, capacity)]
    bounds = []
    for number, candidate in enumerate(fitting):
        first = candidate.with_microbatches(candidate.microbatches[0])
        most = candidate.microbatches[-1]
        bounds.append((workload.bound(first, cluster, most), number))
    heapq.heapify(bounds)
    best: dict[tuple[int, ...], Plan] = {}
    priced = 0
    while bounds:
        bound, number = heapq.heappop(bounds)
        if bound > _limit(best, top):
            break
        candidate = fitting[number]
        mesh = mesh_of(candidate.layout)
        for plan in _priced(workload, cluster, candidate, capacity, best, top):
            priced += 1
            if mesh not in best or score(plan) < score(best[mesh]):
                best[mesh] = plan
    plans = sorted(best.values(), key=score)[:top]
    return Found(tuple(plans), len(tried), len(fitting), priced)


def score(plan: Plan) -> tuple[float, ...]:
    """Returns what plans are ranked by: time, and where it is the same what is simpler."""
    changed = plan.choice.moments != "float32"
    layout = plan.layout
    axes = sum(layout.size(axis) > 1 for axis in AXES)
    return (
        plan.seconds * (_NUMERICS if changed else 1.0),
        axes,
        layout.microbatches,
        plan.choice.loss_chunks,
        plan.memory.total,
    )


def capacity_bytes(cluster: Cluster) -> float:
    """Returns the memory of one device.

    Raises:
        MeshError: If the chip is not known.
    """
    if isinstance(cluster, MeasuredCluster):
        return cluster.measured.memory_bytes
    if cluster.chip is None:
        raise MeshError(
            f"cluster {cluster.name!r}: what its devices compute and hold is not known.\n"
            "  Run `shardlib calibrate` on them first, or name TPUs or GPUs, as in v5p-128, 8xh100."
        )
    return cluster.chip.memory_bytes_per_device


def least_layers(
    workload: Workload, layout: Layout, choice: Choice, cluster: Cluster, capacity: float
) -> Choice | None:
    """Returns a choice with the fewest layers that must follow its policy for the step to fit, or
    None when it does not fit anyhow. Each more layer that recomputes holds less; the first does
    not, as what is computed again has to lie somewhere: none at all is a policy of its own."""

    def fits(layers: int | None) -> bool:
        some = dataclasses.replace(choice, layers=layers)
        return workload.memory(layout, some, cluster).fits(capacity)

    most = choice.layers
    if not fits(most):
        return None
    if most is None:
        return choice
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return dataclasses.replace(choice, layers=low)


def _may_fit(workload: Workload, cluster: Cluster, candidate: Candidate, capacity: float) -> bool:
    """Whether the leanest choice fits with the fewest or the most microbatches: with those between
    a device holds more than with the most."""
    counts = candidate.microbatches
    for count in (counts[-1], counts[0]):
        layout = candidate.with_microbatches(count)
        if workload.memory(layout, workload.leanest(layout, cluster), cluster).fits(capacity):
            return True
    return False


def _priced(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    capacity: float,
    best: dict[tuple[int, ...], Plan],
    top: int,
) -> Iterator[Plan]:
    """Yields the plans of a candidate that fit and could be among the best."""
    for count in candidate.microbatches:
        layout = candidate.with_microbatches(count)
        if workload.bound(layout, cluster, count) > _limit(best, top):
            continue
        if not workload.memory(layout, workload.leanest(layout, cluster), cluster).fits(capacity):
            continue
        for choice in workload.choices(layout):
            least = least_layers(workload, layout, choice, cluster, capacity)
            if least is not None:
                memory = workload.memory(layout, least, cluster)
                time = workload.time(layout, least, cluster)
                yield Plan(cluster, layout, least, time, memory)


def _limit(best: dict[tuple[int, ...], Plan], top: int) -> float:
    """Seconds that a plan of another mesh must not exceed."""
    if len(best) < top:
        return math.inf
    return heapq.nsmallest(top, (score(plan)[0] for plan in best.values()))[-1]


def mesh_of(layout: Layout) -> tuple[int, ...]:
    """Returns the degrees of a layout's axes."""
    return tuple(layout.size(axis) for axis in AXES)
