"""The planner: what a training step costs on devices that nobody has to rent first."""

from typing import TYPE_CHECKING, Any

from shardlib.plan.answer import Plans as Plans
from shardlib.plan.ask import plan as plan
from shardlib.plan.cost import StepTime as StepTime
from shardlib.plan.cost import step_time as step_time
from shardlib.plan.fixes import Fix as Fix
from shardlib.plan.fixes import cheapest_fixes as cheapest_fixes
from shardlib.plan.layout import SHARDLIB as SHARDLIB
from shardlib.plan.layout import Layout as Layout
from shardlib.plan.layout import Software as Software
from shardlib.plan.memory import Memory as Memory
from shardlib.plan.memory import peak_memory as peak_memory
from shardlib.plan.mixed import MixedPlan as MixedPlan
from shardlib.plan.mixed_answer import MixedPlans as MixedPlans
from shardlib.plan.problem import Choice as Choice
from shardlib.plan.problem import Plan as Plan
from shardlib.plan.problem import Workload as Workload
from shardlib.plan.workload import Experts as Experts
from shardlib.plan.workload import Job as Job
from shardlib.plan.workload import Latent as Latent
from shardlib.plan.workload import Remat as Remat
from shardlib.plan.workload import Transformer as Transformer

if TYPE_CHECKING:
    from shardlib.plan.tracing import trace_workload as trace_workload


def __getattr__(name: str) -> Any:
    # Flax is imported for none of the other models.
    if name == "trace_workload":
        from shardlib.plan.tracing import trace_workload

        return trace_workload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
