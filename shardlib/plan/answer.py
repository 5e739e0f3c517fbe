"""The common part of all answers of `plan`: a ranking, the length of the run, config settings."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from shardlib.cost.machine.constants import fit_errors
from shardlib.cost.machine.measured import MeasuredCluster
from shardlib.errors import MeshError
from shardlib.hardware import Cluster, MixedCluster
from shardlib.hardware.capacity import capacity
from shardlib.humanize import count, duration
from shardlib.mesh import MeshSpec
from shardlib.plan.mixed_search import MixedPlan
from shardlib.plan.objective import Goal
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.search import Found
from shardlib.plan.settings import Settings, to_overrides, to_yaml
from shardlib.plan.why_not import WhyNot

AnyPlan = TypeVar("AnyPlan", Plan, MixedPlan)
FoundT = TypeVar("FoundT", bound=Found[Any] | None)


@dataclasses.dataclass(frozen=True)
class Answer(abc.ABC, Generic[AnyPlan]):
    """The best plans for a model; `str()` gives the report."""

    name: str
    """Name of the model or the config."""
    workload: Workload
    goal: Goal
    found: Found[AnyPlan]
    """Search result with at least one plan."""
    asked: tuple[WhyNot, ...] = ()
    """Answers for the meshes that the question named."""
    notes: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()
    """Config keys that no plan may set."""

    @property
    def best(self) -> AnyPlan:
        """The first plan."""
        return self.found.plans[0]

    @property
    def cluster(self) -> Any:
        """Cluster that the plans are for."""
        return self.best.cluster

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
    def error(self) -> float:
        """Relative error that nine in ten predictions stay below, or for a measured cluster the
        error of its fit. A cluster of several kinds has the error of runs on one kind."""
        if isinstance(self.cluster, MeasuredCluster):
            return self.cluster.measured.fit_error
        return fit_errors()["cv_interval"]

    @property
    def error_source(self) -> str:
        """Meaning of `error`, as a clause that ends with its value."""
        if isinstance(self.cluster, MeasuredCluster):
            return f"the constants fitted here match the measurements within {self.error:.0%}"
        return (
            "90% of published runs that were left out of the fit are predicted within "
            f"{self.error:.0%}"
        )

    def mfu(self, plan: AnyPlan | None = None) -> float:
        """Returns model FLOPs (causal attention) over the peak FLOPs of the chips; 0.0 if
        unknown."""
        plan = self.best if plan is None else plan
        kinds = plan.cluster.kinds if isinstance(plan.cluster, MixedCluster) else (plan.cluster,)
        peak = sum(map(_peak_flops, kinds))
        return self.workload.flops / (peak * plan.seconds) if peak else 0.0

    def settings(self, plan: AnyPlan | None = None) -> Settings:
        """Returns the settings of a plan by config key."""
        found = self._settings(self.best if plan is None else plan)
        return {key: value for key, value in found.items() if key not in self.kept}

    @abc.abstractmethod
    def _settings(self, plan: AnyPlan) -> Settings:
        """Returns the settings of a plan, the kept ones too."""

    def fragment(self, plan: AnyPlan | None = None) -> str:
        """Returns the settings of a plan as YAML, to be merged into a config."""
        return to_yaml(self.settings(plan))

    def overrides(self, plan: AnyPlan | None = None) -> list[str]:
        """Returns the settings of a plan as command-line arguments for `shardlib train CONFIG`."""
        return to_overrides(self.settings(plan))

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        has_length = self.tokens is not None
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
            "run_seconds": self.run_seconds if has_length else None,
            "chip_hours": self.chip_hours if has_length else None,
            "plans": [self._plan_facts(plan) for plan in self.found.plans],
            "bottleneck": self.best.time.bottleneck,
            "why_not": [asked.to_dict() for asked in self.asked],
            "notes": list(self.notes),
        }

    def _plan_facts(self, plan: AnyPlan) -> dict[str, Any]:
        return {
            "settings": self.settings(plan),
            "overrides": self.overrides(plan),
            "seconds": plan.seconds,
            "mfu": self.mfu(plan),
            "time": plan.time.parts,
        }


def _peak_flops(cluster: Cluster) -> float:
    chip = cluster.chip
    each = (chip.flops_per_device("bf16") or chip.flops_per_device("fp16")) if chip else None
    return (each or 0.0) * cluster.num_devices


def relaxing(
    workload: Workload, find: Callable[[Workload], FoundT]
) -> tuple[FoundT, Workload, list[str]]:
    """Returns a search result, its workload and notes on it. Moments in bfloat16 change the
    numerics, so they are tried only if nothing else fits."""
    answer, relaxed = find(workload), workload.relaxed()
    if (answer is None or not answer.plans) and relaxed is not workload:
        again = find(relaxed)
        if again is not None and again.plans:
            note = "A plan exists only with the optimizer's first moment in bfloat16."
            return again, relaxed, [note]
    return answer, workload, []


def explained(
    meshes: Sequence[MeshSpec], explain: Callable[[MeshSpec], WhyNot]
) -> tuple[WhyNot, ...]:
    """Returns the reasons why meshes are not planned.

    Raises:
        MeshError: If meshes cannot be read; the message names all of them.
    """
    reasons, faults = [], []
    for mesh in meshes:
        try:
            reasons.append(explain(mesh))
        except MeshError as error:
            faults.append(str(error))
    if faults:
        raise MeshError("\n".join(faults))
    return tuple(reasons)


def too_slow(
    name: str, workload: Workload, cluster: Cluster | MixedCluster, goal: Goal, seconds: float
) -> MeshError:
    """Returns the error for a step that takes longer than a goal allows."""
    return MeshError(
        f"{name} on {cluster.name} takes {duration(seconds)} a step of "
        f"{count(workload.tokens)} {workload.unit}, but {count(goal.tokens or 0)} in "
        f"{goal.days:g} days allow {duration(goal.seconds(workload.tokens))}.\n"
        "  Take more or faster chips, more days, or a larger batch."
    )


def beyond_default_share(plans: Iterable[Iterable[tuple[Cluster, float]]]) -> list[str]:
    """Returns notes on the memory fraction to set for plans that exceed JAX's default share of a
    GPU. Each plan is its clusters and the bytes that a device of each holds."""
    beyond: dict[str, list[str]] = {}
    for number, devices in enumerate(plans, 1):
        for cluster, held_bytes in devices:
            limit = None if isinstance(cluster, MeasuredCluster) else capacity(cluster.chip)
            if limit is not None and not limit.default_share_suffices(math.ceil(held_bytes)):
                beyond.setdefault(limit.note, []).append(str(number))
                break
    return [
        f"{note} for plan{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}."
        for note, numbers in beyond.items()
    ]
