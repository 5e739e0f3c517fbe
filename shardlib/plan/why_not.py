"""Why a mesh is not the one that was planned: what refuses it, or what it costs."""

import dataclasses

from shardlib.errors import MeshError
from shardlib.hardware import Cluster
from shardlib.mesh import MeshConfig, MeshSpec
from shardlib.plan.candidates import crosses_slices
from shardlib.plan.cost import StepTime
from shardlib.plan.describe import PARTS, gib
from shardlib.plan.fixes import smallest
from shardlib.plan.layout import AXES, Layout
from shardlib.plan.problem import Plan, Workload
from shardlib.plan.search import capacity_bytes, mesh_of, search

_WORTH_NAMING = 0.25
"""Parts that take this share of what the largest takes more."""


@dataclasses.dataclass(frozen=True)
class WhyNot:
    """The answer for one mesh."""

    mesh: str
    reasons: tuple[str, ...]
    """Sentences without an end."""
    plan: Plan | None = None
    """The best plan of the mesh; None where nothing of it can be run or fits."""
    slower: float | None = None
    """By what fraction it is slower."""

    def __str__(self) -> str:
        return f"{self.mesh}: {'; '.join(self.reasons)}"


def why_not(workload: Workload, cluster: Cluster, best: Plan | None, mesh: MeshSpec) -> WhyNot:
    """Returns why a mesh is not planned.

    Args:
        workload: What is trained.
        cluster: On what.
        best: What is planned; None where nothing fits.
        mesh: The mesh asked about, such as `fsdp=8,tensor=8`; -1 takes the devices that remain.

    Raises:
        MeshError: If the mesh cannot be read, or has an axis that the planner does not know.
    """
    config = MeshConfig.parse(mesh).resolve(cluster.num_devices)
    unknown = [name for name in config.names if name not in AXES]
    if unknown:
        raise MeshError(
            f"mesh {config}: the planner does not know {', '.join(unknown)}.\n"
            f"  Use the axes {', '.join(AXES)}."
        )
    layout = Layout.of(config.sizes, cluster.num_slices)
    text = str(config)
    faults = workload.faults(layout)
    if not crosses_slices(layout):
        faults.append(
            f"data={layout.data} and fsdp={layout.fsdp} do not make up the {layout.slices} slices"
        )
    unused = [
        f"{axis}={layout.size(axis)} has no use here"
        for axis in AXES
        if layout.size(axis) > 1
        and axis not in ("data", "fsdp")
        and layout.size(axis) not in workload.degrees(axis, cluster.num_devices)
    ]
    if faults or unused:
        return WhyNot(text, tuple(faults or unused))
    found = search(workload, cluster, top=1, keep=layout)
    if not found.plans:
        return WhyNot(text, (_too_large(workload, cluster, layout),))
    plan = found.plans[0]
    if best is None or mesh_of(best.layout) == mesh_of(layout):
        return WhyNot(text, ("this is the plan",), plan, 0.0)
    slower = plan.seconds / best.seconds - 1
    reason = f"{slower:.1%} slower ({plan.seconds:.4g} s against {best.seconds:.4g} s a step)"
    return WhyNot(text, (reason, *_differences(plan.time, best.time)), plan, slower)


def _too_large(workload: Workload, cluster: Cluster, layout: Layout) -> str:
    least = smallest(workload, cluster, layout)
    if least is None:
        return "no number of microbatches can be run"
    held, most = least.memory.total, capacity_bytes(cluster)
    return f"does not fit: needs {gib(held)} of {gib(most)} even with {_leanest(least, workload)}"


def _leanest(plan: Plan, workload: Workload) -> str:
    policy = plan.choice.policy(workload.num_layers)
    return f"remat {policy} and {plan.layout.microbatches} microbatches"


def _differences(plan: StepTime, best: StepTime) -> tuple[str, ...]:
    """What takes longer, the most first."""
    more = {name: seconds - best.parts[name] for name, seconds in plan.parts.items()}
    largest = max(more.values())
    named = sorted(
        (name for name, seconds in more.items() if seconds > _WORTH_NAMING * largest > 0),
        key=lambda name: -more[name],
    )
    return tuple(
        f"{PARTS[name]} {plan.parts[name]:.3g} s against {best.parts[name]:.3g} s" for name in named
    )
