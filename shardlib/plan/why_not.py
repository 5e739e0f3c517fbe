"""Reasons why a mesh was not planned: why it cannot run, or what it costs."""

import dataclasses
from typing import Any

from shardlib.cost.costs import StepTime
from shardlib.cost.layout import AXES, Layout
from shardlib.errors import MeshError, did_you_mean
from shardlib.hardware import Cluster
from shardlib.humanize import duration, gib
from shardlib.mesh import MeshConfig, MeshSpec
from shardlib.nn.stages import StageCut
from shardlib.plan.fixes import smallest
from shardlib.plan.problem import PARTS, Plan, Workload, largest_parts
from shardlib.plan.search import capacity_bytes, crosses_slices, search

_WORTH_NAMING = 0.25
"""Smallest slowdown worth naming, as a fraction of the largest part's slowdown."""


@dataclasses.dataclass(frozen=True)
class WhyNot:
    """The answer for one mesh."""

    mesh: str
    reasons: tuple[str, ...]
    """Sentences without a full stop."""
    plan: Plan | None = None
    """Best plan of the mesh; None if it cannot run or does not fit."""
    slower: float | None = None
    """Relative slowdown."""
    of_config: bool = False
    """Whether it is the mesh of the planned config."""

    def __str__(self) -> str:
        whose = " (the config's)" if self.of_config else ""
        return f"{self.mesh}{whose}: {'; '.join(self.reasons)}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        return {
            "mesh": self.mesh,
            "of_config": self.of_config,
            "reasons": list(self.reasons),
            "slower": self.slower,
        }


def why_not(workload: Workload, cluster: Cluster, best: Plan, mesh: MeshSpec) -> WhyNot:
    """Returns the reasons why a mesh, such as `fsdp=8,tensor=8`, is not planned; -1 takes the
    remaining devices.

    Raises:
        MeshError: If the mesh cannot be read, or has an axis unknown to the planner.
    """
    config = read_mesh(mesh, cluster.num_devices)
    layout, text = Layout.of(config.sizes, cluster.num_slices), str(config)
    if refused := _refused(workload, cluster, layout):
        return WhyNot(text, tuple(refused))
    outcome = search(workload, cluster, top=1, keep=layout)
    if not outcome.plans:
        return WhyNot(text, (_too_large(workload, cluster, layout),))
    plan = outcome.plans[0]
    return compared(text, plan, best, _differences(plan.time, best.time))


def compared(mesh: str, plan: Plan, best: Plan, differences: tuple[str, ...] = ()) -> WhyNot:
    """Returns the answer for a mesh that can run."""
    if plan.layout.sizes == best.layout.sizes:
        return WhyNot(mesh, ("this is the plan",), plan, 0.0)
    slower = plan.seconds / best.seconds - 1
    both = f"{duration(plan.seconds)} against {duration(best.seconds)} a step"
    return WhyNot(mesh, (f"{slower:.1%} slower ({both})", *differences), plan, slower)


def read_mesh(mesh: MeshSpec, num_devices: int) -> MeshConfig:
    """Returns a mesh asked about, resolved for `num_devices` devices.

    Raises:
        MeshError: If it cannot be read, does not fill the devices, or has an axis unknown to the
            planner.
    """
    config = MeshConfig.parse(mesh)
    unknown = [name for name in config.names if name not in AXES]
    if unknown:
        raise MeshError(
            f"mesh {config}: the planner does not know {', '.join(unknown)}."
            f"{did_you_mean(unknown[0], AXES)}\n  Use the axes {', '.join(AXES)}."
        )
    return config.resolve(num_devices)


def _refused(workload: Workload, cluster: Cluster, layout: Layout) -> list[str]:
    """Returns the reasons why a layout cannot run or, if it can, its axes without use."""
    faults = workload.faults(layout)
    if not crosses_slices(layout):
        faults.append(
            f"data={layout.data} and fsdp={layout.fsdp} do not make up the {layout.slices} slices"
        )
    idle = StageCut(workload.num_layers, layout.stage).idle_share
    return faults or [
        f"{axis}={layout.size(axis)} "
        + (f"leaves {idle:.0%} of its layer slots idle" if axis == "stage" else "has no use here")
        for axis in AXES
        if layout.size(axis) > 1
        and axis not in ("data", "fsdp")
        and layout.size(axis) not in workload.degrees(axis, cluster.num_devices)
    ]


def _too_large(workload: Workload, cluster: Cluster, layout: Layout) -> str:
    least = smallest(workload, cluster, layout)
    if least is None:
        return "no number of microbatches can be run"
    held, most = least.memory, capacity_bytes(cluster)
    return (
        f"does not fit: a device needs {gib(held.total)} ({largest_parts(held)}) and has "
        f"{gib(most)}, even with {_leanest(least, workload)}"
    )


def _leanest(plan: Plan, workload: Workload) -> str:
    policy = plan.choice.policy(workload.num_layers)
    state = ", the optimizer state on the host" if plan.layout.offload_optimizer else ""
    return f"remat {policy}{state} and {plan.layout.microbatches} microbatches"


def _differences(plan: StepTime, best: StepTime) -> tuple[str, ...]:
    """Returns the parts that take longer, largest difference first."""
    more = {name: seconds - best.parts[name] for name, seconds in plan.parts.items()}
    largest = max(more.values())
    named = sorted(
        (name for name, seconds in more.items() if seconds > _WORTH_NAMING * largest > 0),
        key=lambda name: -more[name],
    )
    return tuple(
        f"{PARTS[name]} {duration(plan.parts[name])} against {duration(best.parts[name])}"
        for name in named
    )
