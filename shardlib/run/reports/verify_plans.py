"""Verification of plans by ahead-of-time compilation: ranks them by real peaks and traffic."""

import dataclasses
from collections.abc import Callable
from typing import Any

from shardlib import humanize
from shardlib.cost.layout import Software
from shardlib.errors import DoesNotFitError, ModelError, ShardlibError
from shardlib.explain.report.report import StepReport
from shardlib.humanize import duration
from shardlib.plan.problem import Plan
from shardlib.plan.result import Plans
from shardlib.plan.settings import mesh_text
from shardlib.plan.workloads.transformer import TransformerWorkload
from shardlib.run.config import RunConfig
from shardlib.run.reports.explaining import explain_compiled
from shardlib.tables import Table

_NETWORK = ("tensor", "context", "expert", "fsdp", "data", "stage")
_ALL_SHOWN = {
    field.name: False for field in dataclasses.fields(Software) if field.name.startswith("overlap")
}


@dataclasses.dataclass(frozen=True)
class Verified:
    """One plan, compiled.

    Attributes:
        plan: The plan, with the predictions of the cost model.
        seconds: Predicted seconds of a step, corrected by the traffic of the compiled program.
        peak_bytes: Peak bytes of the compiled program on a device; None if it was not compiled.
        capacity_bytes: Usable bytes of a device, if known.
        traffic: Network time of the compiled program divided by the network time of the cost model,
            both without overlap; None if either is unknown.
        fault: Why the plan cannot be run, else empty.
    """

    plan: Plan
    seconds: float
    peak_bytes: int | None
    capacity_bytes: float | None
    traffic: float | None
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Verification:
    """Plans in the order of their corrected times; plans that cannot be run come last."""

    plans: tuple[Verified, ...]

    def table(self) -> Table:
        """Returns the plans as a table."""
        columns = ("mesh", "step>", "corrected>", "traffic>", "memory>", "compiled>", "")
        return Table("the plans, compiled", columns, [_row(verified) for verified in self.plans])

    def to_dict(self) -> list[dict[str, Any]]:
        """Returns the plans as plain data."""
        return [
            {
                "mesh": mesh_text(verified.plan.layout),
                "predicted_seconds": verified.plan.seconds,
                "seconds": verified.seconds,
                "predicted_bytes": verified.plan.memory.total,
                "peak_bytes": verified.peak_bytes,
                "traffic": verified.traffic,
                "fault": verified.fault,
            }
            for verified in self.plans
        ]


def verify(plans: Plans, load: Callable[[list[str]], RunConfig], count: int) -> Verification:
    """Compiles the best plans for their cluster, and ranks them again.

    Raises:
        ModelError: If the plans are not for a transformer.
        MissingExtraError: If the compiler of the cluster's platform is not installed.
    """
    workload = plans.workload
    if not isinstance(workload, TransformerWorkload):
        raise ModelError(
            f"the plans of {plans.name} come from its traced step, which has no traffic to verify."
            "\n  Look at one of them with shardlib explain --on."
        )
    verified = []
    for plan in plans.found.plans[:count]:
        config = load(plans.overrides(plan))
        try:
            report = explain_compiled(config, plan.cluster.name, most_fixes=0)
        except DoesNotFitError as error:
            verified.append(
                Verified(plan, plan.seconds, error.needed_bytes, None, None, "too large")
            )
        except ShardlibError as error:
            why = str(error).splitlines()[0]
            verified.append(Verified(plan, plan.seconds, None, None, None, why))
        else:
            verified.append(_verified(plan, workload, report))
    return Verification(tuple(sorted(verified, key=lambda one: (bool(one.fault), one.seconds))))


def _verified(plan: Plan, workload: TransformerWorkload, report: StepReport) -> Verified:
    memory = report.memory
    compiled = sum(flow.total_seconds or 0.0 for flow in report.flows)
    plainly = dataclasses.replace(
        workload, software=dataclasses.replace(workload.software, **_ALL_SHOWN)
    )
    whole = plainly.time(plan.layout, plan.choice, plan.cluster).parts
    predicted = sum(whole[name] for name in _NETWORK)
    exposed = sum(plan.time.parts[name] for name in _NETWORK)
    traffic = compiled / predicted if predicted and report.flows else None
    return Verified(
        plan,
        # The part of a collective that the cost model overlaps stays overlapped.
        plan.seconds + exposed * ((traffic or 1.0) - 1.0),
        memory.peak_bytes,
        memory.capacity_bytes,
        traffic,
        "" if report.fits else "does not fit",
    )


def _row(verified: Verified) -> tuple[str, ...]:
    return (
        mesh_text(verified.plan.layout),
        duration(verified.plan.seconds),
        duration(verified.seconds),
        "?" if verified.traffic is None else f"{verified.traffic:.2f}x",
        humanize.size(verified.plan.memory.total),
        "?" if verified.peak_bytes is None else humanize.size(verified.peak_bytes),
        verified.fault,
    )
