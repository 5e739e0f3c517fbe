"""Traced steps as workloads of the search: their time and memory on any layout."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.cost import pricing
from shardlib.cost.costs import RUNTIME_BYTES, CollectiveCost, Memory, StepTime
from shardlib.cost.layout import AXES, SHARDLIB, Layout, Software
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.measured import prices_cudnn, software_on
from shardlib.cost.machine.rates import Rates, rates_on
from shardlib.cost.traced.costs import Tally, step_costs
from shardlib.cost.traced.layout import nbytes
from shardlib.cost.traced.stages import stage_collectives
from shardlib.cost.traced.step import TracedStep, shards
from shardlib.errors import RuleError
from shardlib.functional.precision import Precision
from shardlib.hardware import Cluster
from shardlib.jaxprs import holds
from shardlib.nn.stages import layer_faults
from shardlib.plan.problem import Choice
from shardlib.plan.search import capacity_bytes
from shardlib.rules import STANDARD, AxisRules
from shardlib.rules.resolve import STAGE
from shardlib.sharding.partition import Placement

_DRAWS = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator"})


@dataclasses.dataclass(frozen=True, eq=False)
class TracedWorkload:
    """One step of a traced model; a `Workload`."""

    name: str
    """Name of the model's class."""
    step: TracedStep
    batch: int
    """Examples per step, over all devices."""
    precision: Precision
    retrace: Callable[..., "TracedWorkload"]
    """Function that traces the same step for a batch of other shapes; with `platform`, for
    another platform."""
    software: Software = SHARDLIB
    constants: Mapping[str, float] = dataclasses.field(default_factory=committed)
    unit_of_examples: str | None = None
    """Unit of a batch without a length; None: `images` or `examples`, by its shapes."""
    takes_inputs: bool = False
    """Whether its module is created from example inputs."""
    platform: str | None = None
    """Platform that the step is traced for."""

    @property
    def rules(self) -> AxisRules:
        """Rules of the traced step."""
        return self.step.rules

    @property
    def tokens(self) -> int:
        """Tokens per step if the batch has a length, otherwise its examples."""
        return self.batch * self.step.length

    @property
    def unit(self) -> str:
        """Unit of `tokens`."""
        if self.step.length > 1:
            return "tokens"
        if self.unit_of_examples is not None:
            return self.unit_of_examples
        ranks = [len(leaf.shape) for leaf in jax.tree.leaves(self.step.examples)]
        return "images" if max(ranks) == 4 else "examples"

    @functools.cached_property
    def flops(self) -> float:
        """FLOPs of matmuls and convolutions per step, over all devices, without recomputation and
        the optimizer."""
        return self.costs(Layout())[0].flops("forward", "backward")

    def with_batch(self, batch: int) -> "TracedWorkload":
        """Returns the workload with another number of examples per step."""
        return self if batch == self.batch else dataclasses.replace(self, batch=batch)

    def relaxed(self) -> "TracedWorkload":
        """Returns the workload itself: no choice changes its numerics."""
        return self

    @property
    def num_layers(self) -> int:
        """Always 1, because the program recomputes as its model says."""
        return 1

    def degrees(self, axis: str, most: int) -> Sequence[int]:
        """Returns the degrees, up to `most` and dividing it, that a mesh axis may have."""
        if axis not in self.step.mesh_axes:
            return (1,)
        sizes = [n for n in range(1, most + 1) if most % n == 0]
        return [n for n in sizes if not self.faults(dataclasses.replace(Layout(), **{axis: n}))]

    def variants(self, layout: Layout, cluster: Cluster) -> Sequence[Layout]:
        """Returns a layout with parameters sharded over `fsdp`, and also with whole parameters
        unless the user chose the rules."""
        stages = (3, 2, 1) if layout.fsdp > 1 and self.rules == STANDARD else (3,)
        stateless = not jax.tree.leaves(self.step.model_state)
        return [
            dataclasses.replace(layout, zero=zero, stateless=stateless)  # type: ignore[arg-type]
            for zero in stages
        ]

    def faults(self, layout: Layout) -> list[str]:
        """Returns the reasons why a layout cannot run, as sentences."""
        if layout.stage > 1 and (reasons := self._stage_faults(layout)):
            return reasons
        if layout.expert > 1 and "expert" not in self.step.mesh_axes:
            return [f"expert={layout.expert}: the model has no experts"]
        used = {*self.step.mesh_axes, STAGE}
        idle = [a for a in AXES if layout.size(a) > 1 and a not in used]
        if idle:
            return [
                f"{a}={layout.size(a)}: the rules put nothing of this model on it" for a in idle
            ]
        try:
            self.step.places(layout)
            self.step.batch_laid(layout, self.batch)
        except RuleError as error:
            return str(error).splitlines()
        parts = layout.batch_shards * layout.microbatches
        if self.batch % parts:
            return [f"data x fsdp x expert x microbatches = {parts} does not divide {self.batch}"]
        return []

    def sums_once(self, layout: Layout) -> bool:
        """Returns whether a step sums gradients over `data` once by default, and over `context`
        where the layout allows it. Assumes that the loss is a mean over rows, whose positions meet
        in attention alone."""
        apart = layout.stateless and "expert" not in self.step.mesh_axes and not self._draws
        return apart and layout.microbatches > 1 and layout.stage == 1

    @functools.cached_property
    def _draws(self) -> bool:
        """Whether the program draws random numbers."""
        return holds(self.step.gradient, *_DRAWS)

    def choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns the only choice: the program as the model wrote it."""
        return (Choice(),)

    def lean_choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns the only choice."""
        return (Choice(),)

    def memory(self, layout: Layout, choice: Choice, cluster: Cluster) -> Memory:
        """Returns the memory of one device at the peak of a step."""
        return self.peak_memory(layout, cluster)

    def time(self, layout: Layout, choice: Choice, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step."""
        return self.step_time(layout, cluster)

    def bound(self, layout: Layout, cluster: Cluster, most_microbatches: int) -> float:
        """Returns the seconds with the fewest microbatches that fit. More microbatches compute the
        same in smaller pieces and communicate more often, until replicas sum once a step."""
        group = self.batch // layout.batch_shards
        least = min(layout.microbatches, 2 if layout.zero == 2 else 1)

        def first(accepts: Callable[[Layout], bool], default: Layout) -> Layout:
            counts = (n for n in range(least, most_microbatches + 1) if group % n == 0)
            split = (dataclasses.replace(layout, microbatches=n) for n in counts)
            return next(filter(accepts, split), default)

        capacity = capacity_bytes(cluster)
        fewest = first(lambda one: self.peak_memory(one, cluster).fits(capacity), layout)
        found = self.step_time(fewest, cluster).total
        if fewest.microbatches == 1:
            return found
        apart = first(lambda one: one.reduces_once or self.sums_once(one), fewest)
        return min(found, self.step_time(apart, cluster).total)

    def step_time(self, layout: Layout, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step.

        Raises:
            RuleError: If the rules cannot place the parameters.
            ConfigError: If the devices cannot multiply in the workload's precision.
        """
        wide = jnp.dtype(self.precision.compute).itemsize == 4
        counts = self.costs(layout, cluster.platform)
        late = self.late_axes(layout)
        kernels = self._attention(layout, cluster)
        costs = step_costs(*counts, layout, late=late, sums_twice=not wide, attention=kernels)
        costs.collectives_once += self.between_stages(layout, counts[0])
        return pricing.step_time(costs, self._machine(layout, cluster))

    def forward_seconds(self, cluster: Cluster) -> float:
        """Returns the seconds of the kernels of the forward pass on one device, without those to
        write what the backward pass reads."""
        tally, _ = self.costs(Layout(), cluster.platform)
        work = tally.work(attention=self._attention(Layout(), cluster))
        machine = self._machine(Layout(), cluster)
        spent = machine.seconds(work)
        forward = sum(seconds for (_, during), seconds in spent.items() if during == "forward")
        return max(forward - tally.kept_bytes / machine.rates.memory, 0.0)

    def _attention(self, layout: Layout, cluster: Cluster) -> str:
        """Returns the kernels of attention, as in `Software`."""
        # The ring over `context` is not cuDNN's.
        return "cudnn" if prices_cudnn(cluster) and layout.context == 1 else "flash"

    def _machine(self, layout: Layout, cluster: Cluster) -> pricing.Machine:
        """Returns a device of a layout."""
        wide = jnp.dtype(self.precision.compute).itemsize == 4
        software = software_on(cluster, self.software)
        rates = rates_on(cluster, "f32" if wide else "bf16", self.constants)
        links_of = pricing.by_joint_axes(layout, cluster, self.constants, software)
        others = self._wide(cluster, rates)
        return pricing.Machine(layout, software, cluster, rates, links_of, others)

    def between_stages(self, layout: Layout, gradient: Tally) -> list[CollectiveCost]:
        """Returns the collectives over `stage` in a step, from the costs of a microbatch."""
        if layout.stage == 1:
            return []
        places = self.step.places(layout)
        trained, frozen = places["gradients"].values(), places["model_state"].values()

        def elements(placed: Iterable[Placement]) -> float:
            return sum(math.prod(one.shape) / shards(one, layout) for one in placed)

        width = jnp.dtype(self.precision.compute).itemsize
        return stage_collectives(
            layout,
            gradient.carried_bytes,
            summed_bytes=4.0 * elements(one for one in trained if not one.has_stages),
            moved_bytes=[
                width * elements(one for one in (*trained, *frozen) if one.moved_stage),
                4.0 * elements(one for one in trained if one.moved_stage),
            ],
        )

    def _stage_faults(self, layout: Layout) -> list[str]:
        """Returns the reasons why a layout cannot cut the layers into stages."""
        places = self.step.places(layout)
        placed = (*places["params"].values(), *places["model_state"].values())
        num_layers, *others = {one.shape[0] for one in placed if one.has_stages} or {0}
        if others or not num_layers:
            return [f"stage={layout.stage}: the rules put no single stack of layers on it"]
        return [fault.splitlines()[0] for fault in layer_faults(num_layers, layout.stage)]

    def late_axes(self, layout: Layout) -> tuple[str, ...]:
        """Returns the axes over which gradients are summed once a step."""
        if self.sums_once(layout):
            return ("data", "context") if layout.sums_context_once else ("data",)
        return ("data",) if layout.reduces_once else ()

    def _wide(self, cluster: Cluster, rates: Rates) -> Rates:
        """Returns the rates of float32 matmuls if the devices have them."""
        if cluster.chip is not None and cluster.chip.bf16_flops is None:
            return rates
        return rates_on(cluster, "f32", self.constants)

    def peak_memory(self, layout: Layout, cluster: Cluster) -> Memory:
        """Returns the memory of one device at the peak of a step."""
        places = self.step.places(layout)
        params = jax.tree.leaves(self.step.params)
        gradients = sum(
            4.0 * math.prod(leaf.shape) / shards(place, layout)
            for leaf, place in zip(params, places["gradients"].values(), strict=True)
        )
        costs, _ = self.costs(layout, cluster.platform)
        kept = min(costs.kept_bytes, costs.peak_bytes)
        state = jax.tree.leaves(self.step.model_state)
        return Memory(
            params=_held(layout, params, places["params"])
            + _held(layout, state, places["model_state"]),
            gradients=gradients,
            optimizer=_held(layout, jax.tree.leaves(self.step.opt_state), places["moments"]),
            activations=kept + layout.kept_inputs * costs.carried_bytes,
            recomputed=costs.peak_bytes - kept,
            gathered=self._gathered(layout, {**places["params"], **places["model_state"]}),
            runtime=RUNTIME_BYTES[cluster.platform],
        )

    def costs(self, layout: Layout, platform: str | None = None) -> tuple[Tally, Tally]:
        """Returns the costs of one device of a platform for a microbatch, and for the update after
        it."""
        if platform and self.step.asks_platform and platform != jax.default_backend():
            return self._on(platform).costs(layout, platform)
        traced = self.step
        # The program of another batch, or of a microbatch, is the same with other sizes.
        if (2 * traced.batch) % self.batch or traced.batch % layout.batch_shards:
            traced = self._traced_anew
        return traced.costs(layout, layout.microbatches * traced.batch / self.batch, platform)

    @functools.cached_property
    def _on(self) -> Callable[[str], "TracedWorkload"]:
        batch = self.step.batch_of(self.batch)
        return functools.cache(lambda platform: self.retrace(batch, platform=platform))

    @functools.cached_property
    def _traced_anew(self) -> TracedStep:
        if self.batch == self.step.batch:
            return self.step
        return self.retrace(self.step.batch_of(self.batch)).step

    def _gathered(self, layout: Layout, places: Mapping[str, Placement]) -> float:
        """Returns the bytes of the largest parameter gathered over `fsdp`, of the next one, and of
        its gradient."""
        if layout.fsdp == 1 or layout.zero < 3:
            return 0.0
        width = jnp.dtype(self.precision.compute).itemsize
        sizes = (
            math.prod(one.shape) / _stacked(one) / shards(one, layout, without=("fsdp", STAGE))
            for one in places.values()
        )
        return 3.0 * width * max(sizes, default=0.0)


def _stacked(placement: Placement) -> int:
    """Returns the number of layers that a parameter stacks, of which one is in use at a time."""
    names = placement.logical_axes or ()
    return placement.shape[0] if names[:1] == ("layers",) else 1


def _held(layout: Layout, leaves: Sequence[Any], places: Mapping[str, Placement]) -> float:
    return sum(
        nbytes(leaf) / shards(one, layout)
        for leaf, one in zip(leaves, places.values(), strict=True)
    )
