"""Answers of `plan`, and its errors without a plan."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.humanize import duration, gib
from shardlib.mesh import MeshSpec
from shardlib.plan.answer import Answer, too_slow
from shardlib.plan.fixes import smallest
from shardlib.plan.objective import Goal, next_larger, roomier
from shardlib.plan.problem import Plan, Workload, largest_parts
from shardlib.plan.report import describe
from shardlib.plan.search import Found, candidates, capacity_bytes, search
from shardlib.plan.sensitivity import Lever, levers
from shardlib.plan.settings import Settings, settings
from shardlib.plan.why_not import WhyNot, why_not

_SIMILAR = 0.25
_NEAR_BATCHES = 40
"""Other batches to try when no mesh divides a batch."""


@dataclasses.dataclass(frozen=True)
class Plans(Answer[Plan]):
    """The best plans for a model on a cluster; `str()` gives the report."""

    found: Found[Plan]
    in_code: bool = False
    """Whether the model is the user's own, without a config, so that a plan is shown as code."""

    @property
    def cluster(self) -> Cluster:
        """Cluster that the plans are for."""
        return self.best.cluster

    @property
    def capacity_bytes(self) -> float:
        """Memory of one device."""
        return capacity_bytes(self.cluster)

    @property
    def cost(self) -> float | None:
        """USD of the whole run; None without a price or a length of the run."""
        if self.goal.price is None or self.tokens is None:
            return None
        return self.chip_hours * self.goal.price

    @functools.cached_property
    def levers(self) -> list[Lever]:
        """Changes that would make the first plan faster or cheaper."""
        return levers(self.workload, self.best)

    def why_not(self, mesh: MeshSpec) -> WhyNot:
        """Returns the reasons why a mesh is not the plan.

        Raises:
            MeshError: If the mesh cannot be read or does not fill the devices.
        """
        return why_not(self.workload, self.cluster, self.best, mesh)

    def _settings(self, plan: Plan) -> Settings:
        workload = self.workload
        once = workload.sums_once(plan.layout)
        return settings(plan, workload.num_layers, batch=workload.batch, sums_once=once)

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        facts = [dataclasses.asdict(lever) for lever in self.levers]
        return {**super().to_dict(), "cost": self.cost, "levers": facts}

    def _plan_facts(self, plan: Plan) -> dict[str, Any]:
        return {
            **super()._plan_facts(plan),
            "memory": vars(plan.memory) | {"total": plan.memory.total},
            "capacity": capacity_bytes(plan.cluster),
        }

    def text(self, width: int | None = None) -> str:
        """Returns the report; `width` is the most characters of a line of its ranking."""
        return describe(self, self.levers, self.cost, in_code=self.in_code, width=width)

    def __str__(self) -> str:
        return self.text()


def nothing_found(name: str, workload: Workload, tried: Sequence[Cluster], goal: Goal) -> MeshError:
    """Returns the error for a question without a plan on any cluster tried."""
    largest = tried[-1]
    least = smallest(workload, largest)
    if least is None:
        return _nothing_divides(name, workload, largest)
    capacity = capacity_bytes(largest)
    if not least.memory.fits(capacity):
        return _nothing_fits(name, workload, largest, least)
    best = search(workload, largest, top=1).plans[0]
    return too_slow(name, workload, largest, goal, best.seconds)


def _nothing_fits(name: str, workload: Workload, cluster: Cluster, least: Plan) -> MeshError:
    capacity = capacity_bytes(cluster)
    state = ", the optimizer state on the host" if least.layout.offload_optimizer else ""
    lines = [
        f"{name} does not fit {cluster.name}: its leanest plan ({least.layout}, "
        f"{least.layout.microbatches} microbatches, remat {least.choice.remat}{state}) needs "
        f"{gib(least.memory.total)} on a device, which has {gib(capacity)} "
        f"({largest_parts(least.memory)})."
    ]
    lines += [f"  {change}" for change in _ways_out(workload, cluster)[:3]]
    if len(lines) == 1:
        lines.append("  Choose a smaller model, or chips with more memory.")
    return MeshError("\n".join(lines))


def _ways_out(workload: Workload, cluster: Cluster) -> list[str]:
    """Returns changes that make a step fit, lowest time per token first."""
    ways = []
    tries = [("Store the first moment in bfloat16", workload.relaxed(), cluster)]
    larger = next_larger(cluster)
    while larger is not None and not search(workload, larger, top=1).plans:
        larger = next_larger(larger)
    if larger is not None:
        tries.append((f"Take {larger.name}", workload, larger))
    tries += [(f"Take {other.name}", workload, other) for other in roomier(cluster)]
    half = workload.batch // 2
    if half:
        tries.append((f"Halve the batch to {half}", workload.with_batch(half), cluster))
    for text, other, where in tries:
        for plan in search(other, where, top=1).plans:
            line = f"{text}: {duration(plan.seconds)} a step on {plan.layout}"
            ways.append((plan.seconds / other.tokens, f"{line}, {gib(plan.memory.total)}."))
    return [line for _, line in sorted(ways)]


def _nothing_divides(name: str, workload: Workload, cluster: Cluster) -> MeshError:
    """Returns the error for devices with a factor that neither the model nor the batch has."""
    near = (b for b in _near(workload.batch, cluster) if _divides(workload.with_batch(b), cluster))
    first = sorted(itertools.islice(near, 2))
    hint = f"Take a batch of {' or '.join(map(str, first))}" if first else "Take other dims"
    return MeshError(
        f"{name} cannot be split over the {cluster.num_devices} devices of {cluster.name}: no "
        f"degrees that divide the model and a batch of {workload.batch} multiply to "
        f"{cluster.num_devices}.\n  {hint}, or another number of devices."
    )


def _near(batch: int, cluster: Cluster) -> list[int]:
    """Returns batches of a similar size, starting with the most factors in common with the
    devices."""
    near = range(math.ceil(batch * (1 - _SIMILAR)), math.floor(batch * (1 + _SIMILAR)) + 1)
    shared = {b: math.gcd(b, cluster.num_devices) for b in near if b > 0}
    return sorted(shared, key=lambda b: (-shared[b], abs(b - batch)))[:_NEAR_BATCHES]


def _divides(workload: Workload, cluster: Cluster) -> bool:
    return next(iter(candidates(workload, cluster)), None) is not None
