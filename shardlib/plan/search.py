"""Search for the fastest plans on a given cluster: exhaustive, with pruning that loses no plan.

The search tries every mesh whose degrees divide the model and the batch, with every valid number of
microbatches and of pipeline chunks and every choice of the workload. It skips a layout if

- its leanest choice does not fit the memory, with either the fewest or the most microbatches, or
- the lower bound of its time (`Workload.bound`) exceeds the time of the plans found so far, of its
  own mesh or of other meshes.

Layouts are tried in the order of their bounds, so that good plans come first and most other layouts
are never priced. For a layout the search tries its choices; a choice with ranges of layers takes
the fewest layers that must recompute for the step to fit.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from shardlib.cost.costs import Memory
from shardlib.cost.layout import Layout
from shardlib.cost.machine.fabric import outer_degree
from shardlib.cost.machine.measured import MeasuredCluster, check_known
from shardlib.hardware import Cluster
from shardlib.hardware.capacity import capacity as capacity_of
from shardlib.plan.problem import Choice, Plan, Workload, worth_cutting

_ORDER = ("tensor", "context", "expert", "stage", "fsdp")
"""Axes whose degrees are enumerated; `data` takes the remaining devices."""
_MOST_CHUNKS = 4
"""Most chunks of layers on a stage: more chunks send proportionally more, and hardly shrink the
bubble."""
_NUMERICS = 1.02
"""Speedup that a plan with a moment in bfloat16 must exceed, because it changes the numerics."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout without its number of microbatches."""

    layout: Layout
    microbatches: Sequence[int]
    """Possible numbers of microbatches, ascending."""

    def with_microbatches(self, count: int) -> Layout:
        """Returns the layout with `count` microbatches."""
        return dataclasses.replace(self.layout, microbatches=count)

    def where(self, accepts: Callable[[Layout], bool]) -> "Candidate":
        """Returns the candidate restricted to the numbers of microbatches with an accepted
        layout."""
        counts = [n for n in self.microbatches if accepts(self.with_microbatches(n))]
        return dataclasses.replace(self, microbatches=counts)


def candidates(workload: Workload, cluster: Cluster) -> Iterator[Candidate]:
    """Yields every layout of all devices of a cluster, with its numbers of microbatches. `data`
    crosses the slices of a cluster, and so does `fsdp` if `data` is too small."""
    for sizes in meshes(workload, cluster):
        layout = Layout.of(sizes, cluster.num_slices)
        if not crosses_slices(layout):
            continue
        for variant in workload.variants(layout, cluster):
            yield from of_layout(workload, variant)


def of_layout(workload: Workload, layout: Layout) -> Iterator[Candidate]:
    """Yields a layout with every number of chunks, and the numbers of microbatches for each. With
    one microbatch ZeRO 2 is the same program as ZeRO 1, because no gradient sums are kept between
    microbatches."""
    group = workload.batch // layout.batch_shards
    counts = [n for n in range(2 if layout.zero == 2 else 1, group + 1) if group % n == 0]
    if counts:
        yield Candidate(layout, counts)
    if layout.stage == 1:
        return
    counts = [n for n in counts if n % layout.stage == 0]
    for chunks in range(2, _MOST_CHUNKS + 1):
        if counts and worth_cutting(workload.num_layers, layout.stage, chunks):
            yield Candidate(dataclasses.replace(layout, chunks=chunks), counts)


def crosses_slices(layout: Layout) -> bool:
    """Returns whether the degrees of `data` and `fsdp` across slices multiply to the number of
    slices."""
    outer = math.prod(outer_degree(layout, axis) for axis in ("data", "fsdp"))
    return outer == layout.slices


def meshes(workload: Workload, cluster: Cluster) -> Iterator[dict[str, int]]:
    """Yields the degrees of every mesh of all devices that divides the model and the batch."""
    num_devices = cluster.num_devices
    allowed = {axis: workload.degrees(axis, num_devices) for axis in (*_ORDER, "data")}
    data = frozenset(allowed["data"])

    def extend(
        position: int, left: int, rows: int, sizes: dict[str, int]
    ) -> Iterator[dict[str, int]]:
        if position == len(_ORDER):
            if left in data and rows % left == 0:
                yield {**sizes, "data": left}
            return
        axis = _ORDER[position]
        splits_rows = axis in ("fsdp", "expert")
        for degree in allowed[axis]:
            if degree > left:
                break
            if left % degree == 0 and not (splits_rows and rows % degree):
                rest = rows // degree if splits_rows else rows
                yield from extend(position + 1, left // degree, rest, {**sizes, axis: degree})

    yield from extend(0, num_devices, workload.batch, {})


class LaidPlan(Protocol):
    """A plan of a cluster of one kind or of several."""

    @property
    def layout(self) -> Layout: ...


PlanT = TypeVar("PlanT", bound=LaidPlan)


@dataclasses.dataclass(frozen=True)
class Found(Generic[PlanT]):
    """Result of a search."""

    plans: tuple[PlanT, ...]
    """Best plan of each of the best meshes, best first; empty if nothing fits."""
    layouts: int
    """Layouts that can run, not counting their microbatches."""
    fitting: int
    """Layouts whose leanest choice fits."""
    priced: int
    """Steps whose time was computed."""


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    top: int = 5,
    keep: Layout | None = None,
    accepts: Callable[[Layout], bool] | None = None,
) -> Found[Plan]:
    """Returns the fastest plans on all devices of a cluster. `keep` restricts the search to the
    mesh of a layout, and `accepts` to some layouts with their microbatches.

    Raises:
        MeshError: If the chip of the cluster is unknown.
    """
    capacity = capacity_bytes(cluster)
    tried = list(candidates(workload, cluster))
    if keep is not None:
        tried = [c for c in tried if c.layout.sizes == keep.sizes]
    if accepts is not None:
        tried = [kept for c in tried if (kept := c.where(accepts)).microbatches]
    fitting = [c for c in tried if _may_fit(workload, cluster, c, capacity)]
    bounds = []
    for candidate in fitting:
        first = candidate.with_microbatches(candidate.microbatches[0])
        bounds.append((workload.bound(first, cluster, candidate.microbatches[-1]), candidate))
    best = BestPlans(top, score)
    for bound, candidate in sorted(bounds, key=lambda pair: pair[0]):
        if bound > best.limit:
            break
        for plan in _priced(workload, cluster, candidate, capacity, best):
            best.offer(plan)
    return Found(best.ranked(), len(tried), len(fitting), best.offered)


class BestPlans(Generic[PlanT]):
    """The best plan of each mesh. `top` meshes are wanted. The seconds of a plan come first in its
    score."""

    def __init__(self, top: int, score: Callable[[PlanT], tuple[float, ...]]):
        self.limit = math.inf
        """Seconds that a plan of another mesh must not exceed."""
        self.offered = 0
        self._top, self._score = top, score
        self._best: dict[tuple[int, ...], tuple[tuple[float, ...], PlanT]] = {}

    def seconds_of(self, layout: Layout) -> float:
        """Returns the seconds of the best plan of a layout's mesh; infinite if the mesh has
        none."""
        found = self._best.get(layout.sizes)
        return math.inf if found is None else found[0][0]

    def offer(self, plan: PlanT) -> None:
        """Keeps a plan unless its mesh has a better one."""
        self.offered += 1
        mesh, score = plan.layout.sizes, self._score(plan)
        if mesh in self._best and score >= self._best[mesh][0]:
            return
        self._best[mesh] = score, plan
        if len(self._best) >= self._top:
            seconds = (score[0] for score, _ in self._best.values())
            self.limit = heapq.nsmallest(self._top, seconds)[-1]

    def ranked(self) -> tuple[PlanT, ...]:
        """Returns the best plans, best first."""
        pairs = sorted(self._best.values(), key=lambda pair: pair[0])
        return tuple(plan for _, plan in pairs[: self._top])


def score(plan: Plan) -> tuple[float, ...]:
    """Returns the ranking key of a plan: time, then simplicity."""
    changed = plan.choice.moments != "float32"
    layout = plan.layout
    return (
        plan.seconds * (_NUMERICS if changed else 1.0),
        sum(size > 1 for size in layout.sizes),
        layout.microbatches,
        plan.choice.loss_chunks,
        plan.memory.total,
    )


def capacity_bytes(cluster: Cluster) -> float:
    """Returns the memory of one device that a program may use.

    Raises:
        MeshError: If the chip of the cluster is unknown.
    """
    if isinstance(cluster, MeasuredCluster):
        return cluster.measured.memory_bytes
    check_known(cluster)
    usable = capacity_of(cluster.chip)
    assert usable is not None, "chips have memory of their own"
    return usable.usable_bytes


def leanest(workload: Workload, layout: Layout, cluster: Cluster) -> Choice:
    """Returns the choice with the least memory."""

    def held(choice: Choice) -> float:
        return workload.memory(layout, choice, cluster).total

    return min(workload.lean_choices(layout, cluster), key=held)


def may_fit(workload: Workload, layout: Layout, cluster: Cluster, capacity: float) -> bool:
    """Returns whether some choice fits a device."""
    lean = workload.lean_choices(layout, cluster)
    return any(workload.memory(layout, choice, cluster).fits(capacity) for choice in lean)


def least_layers(
    workload: Workload, layout: Layout, choice: Choice, cluster: Cluster, capacity: float
) -> Choice | None:
    """Returns a choice with the fewest layers that must follow its policy for the step to fit, or
    None if it does not fit at all. Each further layer that recomputes saves memory, but for the
    first, because the recomputed values need memory (zero layers is a policy of its own), and
    perhaps the last, because a single layer that keeps everything is in no loop. The
    offloaded bytes must not exceed the memory of a device: hosts have as much for each of their
    devices."""

    def held(layers: int | None) -> Memory:
        some = dataclasses.replace(choice, layers=layers)
        return workload.memory(layout, some, cluster)

    high = choice.layers
    below = held(high)
    if not below.fits(capacity) and high is not None and high > 1:
        high -= 1
        below = held(high)
    if not below.fits(capacity):
        return None
    if high is not None and high > 1:
        low, above = 1, held(1)
        if above.fits(capacity):
            high, below = low, above
        while high - low > 1:
            # Every layer holds the same amount, so the first guess is nearly always right.
            share = above.over(capacity) / (above.over(capacity) - below.over(capacity))
            guess = min(max(low + math.ceil(share * (high - low)), low + 1), high - 1)
            memory = held(guess)
            if memory.fits(capacity):
                high, below = guess, memory
            else:
                low, above = guess, memory
    return dataclasses.replace(choice, layers=high) if below.host <= capacity else None


def _may_fit(workload: Workload, cluster: Cluster, candidate: Candidate, capacity: float) -> bool:
    """Returns whether the leanest choice fits with the fewest or the most microbatches. Numbers in
    between take more memory than the most."""
    counts = candidate.microbatches
    return any(
        may_fit(workload, candidate.with_microbatches(count), cluster, capacity)
        for count in (counts[0], counts[-1])
    )


def _priced(
    workload: Workload,
    cluster: Cluster,
    candidate: Candidate,
    capacity: float,
    best: BestPlans[Plan],
) -> Iterator[Plan]:
    """Yields the plans of a candidate that fit and could be among the best."""
    for count in candidate.microbatches:
        layout = candidate.with_microbatches(count)
        bound = workload.bound(layout, cluster, count)
        # Among plans with the same time, fewer microbatches rank first.
        if bound > best.limit or bound >= best.seconds_of(layout):
            continue
        if not may_fit(workload, layout, cluster, capacity):
            continue
        enough: set[tuple[str, int]] = set()
        for choice in workload.choices(layout, cluster):
            alike = choice.moments, choice.loss_chunks
            # If everything can be kept, no range of layers must recompute.
            if alike in enough and choice.layers is not None:
                continue
            chosen = least_layers(workload, layout, choice, cluster, capacity)
            if chosen is None:
                continue
            if chosen.remat == "none":
                enough.add(alike)
            memory = workload.memory(layout, chosen, cluster)
            yield Plan(cluster, layout, chosen, workload.time(layout, chosen, cluster), memory)
