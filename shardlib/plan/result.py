"""Answers of `plan`, and its errors without a plan."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

from shardlib.cost.machine.constants import fit_errors
from shardlib.cost.machine.measured import MeasuredCluster
from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.humanize import count, duration, gib
from shardlib.mesh import MeshSpec
from shardlib.plan.candidates import candidates
from shardlib.plan.describe import describe, largest_parts
from shardlib.plan.fixes import smallest
from shardlib.plan.objective import Goal, next_larger, roomier
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.search import Found, capacity_bytes, search
from shardlib.plan.sensitivity import Lever, levers
from shardlib.plan.settings import Settings, settings, to_overrides, to_yaml
from shardlib.plan.why_not import WhyNot, why_not

_SIMILAR = 0.25
_NEAR_BATCHES = 40
"""Other batches to try when no mesh divides a batch."""


OF_PUBLISHED_RUNS = "nine in ten published runs whose family was not fitted to lie within"
"""Source of the error of a plan on hardware that was not measured."""


@dataclasses.dataclass(frozen=True)
class Plans:
    """The best plans for a model on a cluster; `str()` gives the report."""

    name: str
    """Name of the model or the config."""
    workload: Workload
    goal: Goal
    found: Found
    """Search result with at least one plan."""
    asked: tuple[WhyNot, ...] = ()
    """Answers for the meshes that the question named."""
    notes: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()
    """Config keys that no plan may set."""
    in_code: bool = False
    """Whether the model is the user's own, without a config, so that a plan is shown as code."""

    @property
    def best(self) -> Plan:
        """The first plan."""
        return self.found.plans[0]

    @property
    def cluster(self) -> Cluster:
        """Cluster that the plans are for."""
        return self.best.cluster

    @property
    def capacity_bytes(self) -> float:
        """Memory of one device."""
        return capacity_bytes(self.cluster)

    @property
    def tokens(self) -> float | None:
        """Tokens or images of the whole run; None if not given."""
        return self.goal.tokens

    @property
    def rate(self) -> float:
        """Tokens or images per second of the first plan."""
        return self.workload.tokens / self.best.seconds

    @property
    def run_seconds(self) -> float:
        """Seconds of the whole run; NaN if its length is not given."""
        return math.nan if self.tokens is None else self.tokens / self.rate

    @property
    def chip_hours(self) -> float:
        """Chip-hours of the whole run; NaN if its length is not given."""
        return self.run_seconds * self.cluster.num_chips / 3600

    @property
    def cost(self) -> float | None:
        """USD of the whole run; None without a price or a length of the run."""
        if self.goal.price is None or self.tokens is None:
            return None
        return self.chip_hours * self.goal.price

    @property
    def error(self) -> float:
        """Relative error within which nine in ten predictions lie, as far as known."""
        if isinstance(self.cluster, MeasuredCluster):
            return self.cluster.measured.fit_error
        return fit_errors()["cv_p90_error"]

    @property
    def error_source(self) -> str:
        """Source of `error`, as text."""
        if isinstance(self.cluster, MeasuredCluster):
            return "constants fitted here match the measurements within"
        return OF_PUBLISHED_RUNS

    @functools.cached_property
    def levers(self) -> list[Lever]:
        """Changes that would make the first plan faster or cheaper."""
        return levers(self.workload, self.best)

    def mfu(self, plan: Plan | None = None) -> float:
        """Returns model FLOPs (causal attention) over the peak FLOPs of the chips; 0.0 if
        unknown."""
        plan = self.best if plan is None else plan
        chip = plan.cluster.chip
        peak = (chip.flops_per_device("bf16") or chip.flops_per_device("fp16")) if chip else None
        if not peak:
            return 0.0
        return self.workload.flops / (peak * plan.cluster.num_devices * plan.seconds)

    def settings(self, plan: Plan | None = None) -> Settings:
        """Returns the settings of a plan by config key."""
        plan = self.best if plan is None else plan
        found = settings(plan, self.workload.num_layers, batch=self.workload.batch)
        return {key: value for key, value in found.items() if key not in self.kept}

    def fragment(self, plan: Plan | None = None) -> str:
        """Returns the settings of a plan as YAML, to be merged into a config."""
        return to_yaml(self.settings(plan))

    def overrides(self, plan: Plan | None = None) -> list[str]:
        """Returns the settings of a plan as command-line arguments for `shardlib train CONFIG`."""
        return to_overrides(self.settings(plan))

    def why_not(self, mesh: MeshSpec) -> WhyNot:
        """Returns the reasons why a mesh is not the plan.

        Raises:
            MeshError: If the mesh cannot be read or does not fill the devices.
        """
        return why_not(self.workload, self.cluster, self.best, mesh)

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        return {
            "model": self.name,
            "cluster": self.cluster.name,
            "devices": self.cluster.num_devices,
            "chips": self.cluster.num_chips,
            "objective": self.goal.objective,
            "batch": self.workload.batch,
            self.workload.unit + "_per_step": self.workload.tokens,
            self.workload.unit + "_per_second": self.rate,
            "error": self.error,
            "layouts": self.found.layouts,
            "fitting": self.found.fitting,
            "priced": self.found.priced,
            "run_seconds": None if self.tokens is None else self.run_seconds,
            "chip_hours": None if self.tokens is None else self.chip_hours,
            "cost": self.cost,
            "plans": [self._plan(plan) for plan in self.found.plans],
            "bottleneck": self.best.time.bottleneck,
            "levers": [dataclasses.asdict(lever) for lever in self.levers],
            "why_not": [asked.to_dict() for asked in self.asked],
            "notes": list(self.notes),
        }

    def _plan(self, plan: Plan) -> dict[str, Any]:
        return {
            "settings": self.settings(plan),
            "overrides": self.overrides(plan),
            "seconds": plan.seconds,
            "mfu": self.mfu(plan),
            "time": plan.time.parts,
            "memory": vars(plan.memory) | {"total": plan.memory.total},
            "capacity": capacity_bytes(plan.cluster),
        }

    def __str__(self) -> str:
        return describe(self)


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
    limit = goal.seconds(workload.tokens)
    return MeshError(
        f"{name} on {largest.name} takes {duration(best.seconds)} a step of "
        f"{count(workload.tokens)} {workload.unit}, but {count(goal.tokens or 0)} in "
        f"{goal.days:g} days allow {duration(limit)}.\n"
        "  Take more or faster chips, more days, or a larger batch."
    )


def _nothing_fits(name: str, workload: Workload, cluster: Cluster, least: Plan) -> MeshError:
    capacity = capacity_bytes(cluster)
    state = ", the optimizer state on the host" if least.layout.offload_optimizer else ""
    lines = [
        f"{name} does not fit {cluster.name}: its leanest plan ({least.layout}, "
        f"{least.layout.microbatches} microbatches, remat {least.choice.remat}{state}) needs "
        f"{gib(least.memory.total)} of {gib(capacity)} a device "
        f"({largest_parts(least.memory)})."
    ]
    lines += [f"  {change}" for change in _ways_out(workload, cluster)[:3]]
    if len(lines) == 1:
        lines.append("  Choose a smaller model, or chips with more memory.")
    return MeshError("\n".join(lines))


def _ways_out(workload: Workload, cluster: Cluster) -> list[str]:
    """Returns changes that make a step fit, lowest time per token first."""
    found = []
    tries: list[tuple[str, Workload, Cluster | None]] = [
        ("Store the first moment in bfloat16", workload.relaxed(), cluster)
    ]
    larger = next_larger(cluster)
    while larger is not None:
        plans = search(workload, larger, top=1).plans
        if plans:
            tries.append((f"Take {larger.name}", workload, larger))
            break
        larger = next_larger(larger)
    tries += [(f"Take {other.name}", workload, other) for other in roomier(cluster)]
    half = workload.batch // 2
    if half:
        tries.append((f"Halve the batch to {half}", workload.with_batch(half), cluster))
    for text, other, where in tries:
        plans = search(other, where, top=1).plans if where else ()
        if plans:
            per_token = plans[0].seconds / other.tokens
            line = f"{text}: {duration(plans[0].seconds)} a step on {plans[0].layout}"
            found.append((per_token, f"{line}, {gib(plans[0].memory.total)}."))
    return [line for _, line in sorted(found)]


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
