"""The cost of a step as shardlib partitions it: what a device runs is written out and counted.

The partitioner lowers the gradients of a traced loss under some rules, for a mesh without devices.
The program of one device has the shapes of its shards and all collectives by name, so that its
products, passes over memory, collectives and live bytes need no guess.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractDevice

from shardlib.cost.costs import Memory
from shardlib.cost.layout import AXES, Layout
from shardlib.cost.traced.costs import Tally, Walk
from shardlib.cost.traced.layout import MICRO, Moved, Spec, replicated
from shardlib.cost.traced.step import TracedStep
from shardlib.find.axes import Kind
from shardlib.find.planned import planned_layouts
from shardlib.find.simplified import selected, summed_once, without_repeats
from shardlib.find.traffic import Traffic, counted_traffic
from shardlib.hardware import Cluster
from shardlib.mesh import abstract_mesh
from shardlib.partitioner import Traced, ValueLayout, analyze, execute, from_spec, who_partitions
from shardlib.paths import named_leaves
from shardlib.plan.workloads.traced import TracedWorkload
from shardlib.rules import AxisRules
from shardlib.sharding.constrain import use
from shardlib.sharding.partition import Placement


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredWorkload(TracedWorkload):
    """A traced step whose gradients shardlib partitions; otherwise as `TracedWorkload`."""

    def costs(self, layout: Layout, platform: str | None = None) -> tuple[Tally, Tally]:
        """Returns the costs of one device for a microbatch, and for the update after it."""
        lowered = self._lowered(layout)
        if lowered is None:
            return super().costs(layout, platform)
        return lowered, self.step.update_costs(layout)

    def peak_memory(self, layout: Layout, cluster: Cluster) -> Memory:
        """Returns the memory of one device at the peak of a step. The program holds gathered
        parameters and gradients while they live; sums over microbatches are held throughout."""
        memory = super().peak_memory(layout, cluster)
        if self._lowered(layout) is None:
            return memory
        summed = memory.gradients if layout.microbatches > 1 else 0.0
        return dataclasses.replace(memory, gradients=summed, gathered=0.0)

    def unhidden_seconds(self, layout: Layout, cluster: Cluster) -> float:
        """Returns the seconds of a step that hides no communication behind computation."""
        gone = dict.fromkeys(("overlap_gather", "overlap_data", "overlap_tensor"), False)
        exposed = dataclasses.replace(self, software=dataclasses.replace(self.software, **gone))
        vars(exposed)["_lowered"] = self._lowered
        return exposed.step_time(layout, cluster).total

    def traffic(self, layout: Layout) -> Traffic | None:
        """Returns the bytes that a device sends in a step, by ring algorithms; None if XLA
        partitions the step."""
        return None if self._lowered(layout) is None else counted_traffic(self, layout)

    @functools.cached_property
    def _lowered(self) -> Any:
        return functools.cache(self._lower)

    def _lower(self, layout: Layout) -> Tally | None:
        """Returns the costs of a microbatch on one device; None if XLA partitions it."""
        rows = self.batch // layout.microbatches
        step = self.step
        if rows != step.batch:
            again = self.retrace(step.batch_of(rows)).step
            step = dataclasses.replace(again, rules=step.rules)
        assert self.platform is not None, "rules are found for a cluster"
        return lowered_tally(step, layout, self.platform)


def lowered(workload: TracedWorkload, rules: AxisRules, platform: str) -> LoweredWorkload:
    """Returns a workload under other rules, whose cost is that of its lowered program."""
    step = dataclasses.replace(workload.step, rules=rules)
    fields = {f.name: getattr(workload, f.name) for f in dataclasses.fields(workload)}
    return LoweredWorkload(**{**fields, "step": step, "platform": platform})


def lowered_tally(step: TracedStep, layout: Layout, platform: str) -> Tally | None:
    """Returns the costs of the gradients of a batch on one device, as shardlib partitions them;
    None if XLA partitions them."""
    jaxpr = step.gradient
    closed = ClosedJaxpr(jaxpr.replace(constvars=(), invars=[*jaxpr.constvars, *jaxpr.invars]), ())
    arguments, inputs, batch = _arguments(step, closed.jaxpr, len(jaxpr.constvars), layout)
    mesh = abstract_mesh(str(layout), layout.num_devices)
    mesh = mesh.update(abstract_device=AbstractDevice(platform, None, platform=platform))
    places = step.places(layout)["updates" if layout.microbatches == 1 else "gradients"]
    outputs = [*(_layout(one) for one in places.values()), from_spec((), 0)]
    traced = Traced(closed, [0] * len(closed.jaxpr.outvars))
    with use(mesh, step.rules) as scope:  # type: ignore[arg-type]
        planned = {}
        if step.rules.names is not None:
            planned = planned_layouts(closed, arguments, step.rules, scope.sizes)
        _, analyzed = who_partitions(
            traced, lambda: analyze(traced, scope, inputs, lambda _: outputs, batch, planned)
        )
        if analyzed is None:
            return None
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars]
        made = jax.make_jaxpr(lambda *a: execute(analyzed, scope, a, quiet=True))(*avals)
    (region,) = (e for e in made.eqns if e.primitive.name == "shard_map")
    program = summed_once(without_repeats(region.params["jaxpr"]))
    if platform == "tpu":
        program = selected(program)
    is_param = [kind == "param" for _, kind in arguments]
    return _counted(program, is_param, layout, batch, platform)


def _arguments(
    step: TracedStep, jaxpr: Jaxpr, constants: int, layout: Layout
) -> tuple[list[tuple[str, Kind]], list[ValueLayout], tuple[str, ...]]:
    """Returns the path, kind and layout of each argument of the gradients, and the mesh axes that
    cut the rows of the batch."""
    places = step.places(layout)
    named: list[tuple[str, Kind]] = [("", "constant")] * constants
    layouts = [from_spec((), len(v.aval.shape)) for v in jaxpr.invars[:constants]]  # type: ignore
    for path, one in places["params"].items():
        named.append((path, "param"))
        layouts.append(_layout(one, stored=True))
    for path, one in places["model_state"].items():
        frozen = path in step.module.frozen
        named.append((path, "param" if frozen else "constant"))
        layouts.append(_layout(one, stored=frozen))
    batch: dict[str, None] = {}
    for path, laid in zip(
        named_leaves(step.examples), step.batch_laid(layout, step.batch), strict=True
    ):
        spec = tuple(
            tuple(a for a in axes if a != MICRO and layout.size(a) > 1) for axes in laid.spec
        )
        batch.update(dict.fromkeys(spec[0]))
        named.append((path, "input"))
        layouts.append(ValueLayout(spec))
    for var in jaxpr.invars[len(named) :]:
        named.append(("key", "constant"))
        layouts.append(from_spec((), len(var.aval.shape)))  # type: ignore[attr-defined]
    return named, layouts, tuple(batch)


def _layout(placement: Placement, *, stored: bool = False) -> ValueLayout:
    return from_spec(placement.spec, len(placement.shape), stored=stored)


def _counted(
    program: Jaxpr,
    is_param: Sequence[bool],
    layout: Layout,
    batch: Sequence[str],
    platform: str,
) -> Tally:
    """Returns the costs of the program of one device. `batch` are the mesh axes of the batch: sums
    over them in the backward pass are of gradients."""
    laids = [
        dataclasses.replace(replicated(var.aval), is_param=one)  # type: ignore[arg-type]
        for var, one in zip(program.invars, is_param, strict=True)
    ]
    constants = [replicated(var.aval) for var in program.constvars]  # type: ignore[arg-type]
    sizes = {axis: layout.size(axis) for axis in AXES}
    _, tally = Walk(sizes, _no_names, platform).run(program, [*constants, *laids])
    moved = tally.moved.copy()
    moved.clear()
    for (during, one), count in tally.moved.items():
        sums = during != "forward" and one.kind in ("all_reduce", "reduce_scatter")
        of_param = one.of_param or (sums and set(one.axes) <= set(batch))
        moved[during, Moved(one.kind, one.axes, one.num_bytes, of_param)] += count
    return dataclasses.replace(tally, moved=moved)


def _no_names(names: tuple[str | None, ...], shape: tuple[int, ...], kind: str) -> Spec:
    del names, kind
    return ((),) * len(shape)
