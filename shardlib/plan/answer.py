"""The common part of all answers of `plan`: a ranking, the length of the run, config settings."""

import abc
import dataclasses
import math
from typing import Any, Generic, TypeVar

from shardlib.cost.machine.constants import fit_errors
from shardlib.cost.machine.measured import MeasuredCluster
from shardlib.hardware import Cluster, MixedCluster
from shardlib.plan.mixed_search import MixedPlan
from shardlib.plan.objective import Goal
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.settings import Settings, to_overrides, to_yaml
from shardlib.plan.why_not import WhyNot

AnyPlan = TypeVar("AnyPlan", Plan, MixedPlan)


@dataclasses.dataclass(frozen=True)
class Answer(abc.ABC, Generic[AnyPlan]):
    """The best plans for a model; `str()` gives the report."""

    name: str
    """Name of the model or the config."""
    workload: Workload
    goal: Goal
    found: Any
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
        """Relative error within which nine in ten predictions lie, as far as known. A cluster of
        several kinds has that of runs on one kind."""
        if isinstance(self.cluster, MeasuredCluster):
            return self.cluster.measured.fit_error
        return fit_errors()["cv_p90_error"]

    @property
    def error_source(self) -> str:
        """Source of `error`, as text."""
        if isinstance(self.cluster, MeasuredCluster):
            return "constants fitted here match the measurements within"
        return "nine in ten published runs whose family was not fitted to lie within"

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
        known = self.tokens is not None
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
            "run_seconds": self.run_seconds if known else None,
            "chip_hours": self.chip_hours if known else None,
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
