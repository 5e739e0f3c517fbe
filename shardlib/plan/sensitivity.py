"""Levers that would make the best plan faster or cheaper. Each is computed by the same search with
one change."""

import dataclasses

from shardlib.cost.machine.measured import MeasuredCluster
from shardlib.hardware import Cluster
from shardlib.humanize import duration
from shardlib.plan.objective import next_larger
from shardlib.plan.problem import Plan, Workload, examples, largest_parts
from shardlib.plan.search import search


@dataclasses.dataclass(frozen=True)
class Lever:
    """One change and its effect."""

    change: str
    seconds: float
    """Seconds of a step."""
    rate: float
    """Tokens or images per second, relative to the plan."""
    cost: float
    """Chip-hours for the same number of tokens, relative to the plan."""

    def __str__(self) -> str:
        return (
            f"{self.change}: {duration(self.seconds)} a step, {self.rate - 1:+.0%} throughput, "
            f"{self.cost - 1:+.0%} chip-hours"
        )


def levers(workload: Workload, best: Plan) -> list[Lever]:
    """Returns the effect of changes to the cluster, the batch and the memory, highest throughput
    first. A measured cluster is not compared with other clusters, because only their datasheets are
    known."""
    cluster = best.cluster
    measured = isinstance(cluster, MeasuredCluster)
    tried = []
    larger = None if measured else next_larger(cluster)
    if larger is not None:
        tried.append(_lever(workload, best, f"on {larger.name}", workload, larger))
    for factor, word in ((2, "twice"), (0.5, "half")):
        batch = int(workload.batch * factor)
        if batch * 2 >= workload.batch:
            other = workload.with_batch(batch)
            change = f"{word} the batch ({batch:,} {examples(workload)})"
            tried.append(_lever(workload, best, change, other, cluster))
    tried.append(
        _lever(workload, best, "the first moment in bfloat16", workload.relaxed(), cluster)
    )
    if not measured and (doubled := _with_twice_the_memory(cluster)):
        change = f"with twice the memory a device ({largest_parts(best.memory, 1)} now)"
        tried.append(_lever(workload, best, change, workload, doubled))
    useful = [lever for lever in tried if lever is not None and abs(lever.rate - 1) >= 0.005]
    return sorted(useful, key=lambda lever: -lever.rate)


def _lever(
    workload: Workload, best: Plan, change: str, other: Workload, cluster: Cluster
) -> Lever | None:
    plans = search(other, cluster, top=1).plans
    if not plans:
        return None
    tokens = other.tokens / workload.tokens
    rate = tokens * best.seconds / plans[0].seconds
    cost = plans[0].device_seconds / best.device_seconds / tokens
    return Lever(change, plans[0].seconds, rate, cost)


def _with_twice_the_memory(cluster: Cluster) -> Cluster | None:
    """Returns the cluster with twice the memory, to show what the memory limit costs in time."""
    if cluster.chip is None:
        return None
    chip = dataclasses.replace(cluster.chip, memory_bytes=2 * cluster.chip.memory_bytes)
    return dataclasses.replace(cluster, chip=chip)
