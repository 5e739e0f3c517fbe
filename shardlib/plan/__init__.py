"""Planner: the predicted cost of a training step, without renting its devices first."""

from typing import TYPE_CHECKING, Any

from shardlib.cost.costs import Memory as Memory
from shardlib.cost.costs import StepTime as StepTime
from shardlib.cost.layout import SHARDLIB as SHARDLIB
from shardlib.cost.layout import Layout as Layout
from shardlib.cost.layout import Software as Software
from shardlib.cost.transformer.memory import peak_memory as peak_memory
from shardlib.cost.transformer.step_time import step_time as step_time
from shardlib.cost.workload import Experts as Experts
from shardlib.cost.workload import Job as Job
from shardlib.cost.workload import Latent as Latent
from shardlib.cost.workload import Remat as Remat
from shardlib.cost.workload import Transformer as Transformer
from shardlib.plan.api import plan as plan
from shardlib.plan.fixes import Fix as Fix
from shardlib.plan.fixes import cheapest_fixes as cheapest_fixes
from shardlib.plan.mixed_result import MixedPlans as MixedPlans
from shardlib.plan.mixed_search import MixedPlan as MixedPlan
from shardlib.plan.problem import Choice as Choice
from shardlib.plan.problem import Plan as Plan
from shardlib.plan.problem import Workload as Workload
from shardlib.plan.result import Plans as Plans

if TYPE_CHECKING:
    from shardlib.plan.workloads.tracing import trace_workload as trace_workload


def __getattr__(name: str) -> Any:
    # Imported on demand: the other models do not need Flax.
    if name == "trace_workload":
        from shardlib.plan.workloads.tracing import trace_workload

        return trace_workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
