"""The search for the fastest plans on a given cluster: exhaustive, with pruning that loses none.

Tried is every mesh whose degrees the model and the batch divide by, with every number of
microbatches and of pipeline chunks that can be run and every choice of the workload. A layout is
left out when

- not even its leanest choice fits the memory, with the fewest and with the most microbatches, or
- the least time that it could take (`Workload.bound`) is more than that of the plans found before,
  of its own mesh or of others.

Layouts are tried in the order of those bounds, so that good plans come first and most of the rest
is never priced. What is tried for a layout are its choices, and of ranges of layers the fewest that
must recompute for the step to fit.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator

from shardlib.errors import MeshError
from shardlib.explain.capacity import capacity as capacity_of
from shardlib.hardware import Cluster
from shardlib.plan.candidates import Candidate, candidates
from shardlib.plan.layout import AXES, Layout
from shardlib.plan.measured import MeasuredCluster
from shardlib.plan.memory import Memory
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
    accepts: Callable[[Layout], bool] | None = None,
) -> Found:
    """Returns the fastest plans on all devices of a cluster.

    Args:
        workload: What is trained.
        cluster: TPU or GPU devices, or CPU devices whose speed was measured.
        top: How many meshes to return a plan of.
        keep: A layout whose mesh alone is searched; None for all.
        accepts: Whether a layout, with its microbatches, may be taken; None for all.

    Raises:
        MeshError: If the chip of the cluster is not known.
    """
    capacity = capacity_bytes(cluster)
    tried = list(candidates(workload, cluster))
    if keep is not None:
        tried = [c for c in tried if mesh_of(c.layout) == mesh_of(keep)]
    if accepts is not None:
        tried = [kept for c in tried if (kept := c.where(accepts)).microbatches]
    fitting = [c for c in tried if _may_fit(workload, cluster, c, capacity)]
    bounds = []
    for number, candidate in enumerate(fitting):
        first = candidate.with_microbatches(candidate.microbatches[0])
        most = candidate.microbatches[-1]
        bounds.append((workload.bound(first, cluster, most), number))
    heapq.heapify(bounds)
    best, priced = _Best(top), 0
    while bounds:
        bound, number = heapq.heappop(bounds)
        if bound > best.limit:
            break
        for plan in _priced(workload, cluster, fitting[number], capacity, best):
            priced += 1
            best.offer(plan)
    plans = sorted(best.plans.values(), key=score)[:top]
    return Found(tuple(plans), len(tried), len(fitting), priced)


class _Best:
    """The best plan of each mesh."""

    def __init__(self, top: int):
        self.plans: dict[tuple[int, ...], Plan] = {}
        self.limit = math.inf
        """Seconds that a plan of another mesh must not exceed."""
        self._top = top
        self._seconds: dict[tuple[int, ...], float] = {}

    def seconds_of(self, layout: Layout) -> float:
        """Returns the seconds of the plan of a layout's mesh; infinite where there is none yet."""
        return self._seconds.get(mesh_of(layout), math.inf)

    def offer(self, plan: Plan) -> None:
        """Keeps a plan if there is no better one of its mesh."""
        mesh = mesh_of(plan.layout)
        if mesh in self.plans and score(plan) >= score(self.plans[mesh]):
            return
        self.plans[mesh] = plan
        self._seconds[mesh] = score(plan)[0]
        if len(self.plans) >= self._top:
            self.limit = heapq.nsmallest(self._top, self._seconds.values())[-1]


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
    """Returns what a program may use of the memory of one device.

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
    usable = capacity_of(cluster.chip)
    assert usable is not None, "chips have memory of their own"
    return usable.usable_bytes


def least_layers(
    workload: Workload, layout: Layout, choice: Choice, cluster: Cluster, capacity: float
) -> Choice | None:
    """Returns a choice with the fewest layers that must follow its policy for the step to fit, or
    None when it does not fit anyhow. Each more layer that recomputes holds less; the first does
    not, as what is computed again has to lie somewhere: none at all is a policy of its own. What is
    offloaded must not exceed what a device holds: hosts have as much for each of theirs."""

    def held(layers: int | None) -> Memory:
        some = dataclasses.replace(choice, layers=layers)
        return workload.memory(layout, some, cluster)

    high = choice.layers
    below = held(high)
    if not below.fits(capacity):
        return None
    if high is not None and high > 1:
        low, above = 1, held(1)
        if above.fits(capacity):
            high, below = low, above
        while high - low > 1:
            # Every layer holds as much, so that the first guess is nearly always the answer.
            share = above.over(capacity) / (above.over(capacity) - below.over(capacity))
            guess = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
            found = held(guess)
            if found.fits(capacity):
                high, below = guess, found
            else:
                low, above = guess, found
    return dataclasses.replace(choice, layers=high) if below.host <= capacity else None


def _may_fit(workload: Workload, cluster: Cluster, candidate: Candidate, capacity: float) -> bool:
    """Whether the leanest choice fits with the fewest or the most microbatches: with those between
    a device holds more than with the most."""
    counts = candidate.microbatches
    for count in (counts[0], counts[-1]):
        layout = candidate.with_microbatches(count)
        if workload.memory(layout, workload.leanest(layout, cluster), cluster).fits(capacity):
            return True
    return False


def _priced(
    workload: Workload, cluster: Cluster, candidate: Candidate, capacity: float, best: _Best
) -> Iterator[Plan]:
    """Yields the plans of a candidate that fit and could be among the best."""
    for count in candidate.microbatches:
        layout = candidate.with_microbatches(count)
        bound = workload.bound(layout, cluster, count)
        # Of plans that take as long those with fewer microbatches rank first.
        if bound > best.limit or bound >= best.seconds_of(layout):
            continue
        if not workload.memory(layout, workload.leanest(layout, cluster), cluster).fits(capacity):
            continue
        enough: set[tuple[str, int]] = set()
        for choice in workload.choices(layout, cluster):
            alike = choice.moments, choice.loss_chunks
            # Where everything can be kept nothing need be computed again.
            if alike in enough:
                continue
            chosen = least_layers(workload, layout, choice, cluster, capacity)
            if chosen is None:
                continue
            if chosen.remat == "none":
                enough.add(alike)
            memory = workload.memory(layout, chosen, cluster)
            yield Plan(cluster, layout, chosen, workload.time(layout, chosen, cluster), memory)


def mesh_of(layout: Layout) -> tuple[int, ...]:
    """Returns the degrees of a layout's axes."""
    return tuple(layout.size(axis) for axis in AXES)
