"""A traced step as a workload of the search: what it costs and holds on any layout."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.errors import RuleError
from shardlib.hardware import Cluster
from shardlib.partition import Placement
from shardlib.plan.constants import committed
from shardlib.plan.cost import StepTime
from shardlib.plan.jaxpr_costs import Costs
from shardlib.plan.jaxpr_layout import nbytes
from shardlib.plan.layout import AXES, SHARDLIB, Layout, Software
from shardlib.plan.memory import RUNTIME_BYTES, Memory
from shardlib.plan.problem import Choice
from shardlib.plan.search import capacity_bytes
from shardlib.plan.traced_step import TracedStep, shards
from shardlib.plan.traced_time import traced_time
from shardlib.precision import Precision
from shardlib.rules import STANDARD, AxisRules


@dataclasses.dataclass(frozen=True, eq=False)
class TracedWorkload:
    """One step of a traced model, as the search wants it: a `Workload`."""

    name: str
    """Of the model's class."""
    step: TracedStep
    batch: int
    """Examples of a step, over all devices."""
    precision: Precision
    retrace: Callable[[Any], "TracedWorkload"]
    """Traces the same for a batch of other shapes."""
    software: Software = SHARDLIB
    constants: Mapping[str, float] = dataclasses.field(default_factory=committed)
    takes_inputs: bool = False
    """Whether its module is made from example inputs."""

    @property
    def rules(self) -> AxisRules:
        """The rules that were given."""
        return self.step.rules

    @property
    def tokens(self) -> int:
        """Tokens of a step where the batch has a length, else its examples."""
        return self.batch * self.step.length

    @property
    def unit(self) -> str:
        """What `tokens` counts."""
        if self.step.length > 1:
            return "tokens"
        ranks = [len(leaf.shape) for leaf in jax.tree.leaves(self.step.examples)]
        return "images" if max(ranks) == 4 else "examples"

    @functools.cached_property
    def flops(self) -> float:
        """FLOPs of matmuls and convolutions of a step, over all devices, without what is computed
        again and without the optimizer's."""
        return self.costs(Layout())[0].flops("forward", "backward")

    def with_batch(self, batch: int) -> "TracedWorkload":
        """Returns the same with another number of examples in a step."""
        return self if batch == self.batch else dataclasses.replace(self, batch=batch)

    def relaxed(self) -> "TracedWorkload":
        """Returns the same: there are no choices that change the numbers."""
        return self

    @property
    def num_layers(self) -> int:
        """1: the program recomputes what its model says."""
        return 1

    def degrees(self, axis: str, most: int) -> Sequence[int]:
        """Returns the degrees, up to `most` and dividing it, that a mesh axis may have."""
        if axis not in self.step.mesh_axes:
            return (1,)
        sizes = [n for n in range(1, most + 1) if most % n == 0]
        return [n for n in sizes if not self.faults(dataclasses.replace(Layout(), **{axis: n}))]

    def variants(self, layout: Layout, cluster: Cluster) -> Sequence[Layout]:
        """Returns a layout with parameters over `fsdp`, and with whole ones, unless the rules are
        someone's choice."""
        stages = (3, 2, 1) if layout.fsdp > 1 and self.rules == STANDARD else (3,)
        stateless = not jax.tree.leaves(self.step.model_state)
        return [
            dataclasses.replace(layout, zero=zero, stateless=stateless)  # type: ignore[arg-type]
            for zero in stages
        ]

    def faults(self, layout: Layout) -> list[str]:
        """Returns why a layout cannot be run, as sentences."""
        if layout.stage > 1:
            return [f"stage={layout.stage}: a traced program is not cut into stages"]
        if layout.expert > 1 and "expert" not in self.step.mesh_axes:
            return [f"expert={layout.expert}: the model has no experts"]
        idle = [a for a in AXES if layout.size(a) > 1 and a not in self.step.mesh_axes]
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

    def choices(self, layout: Layout, cluster: Cluster) -> Sequence[Choice]:
        """Returns the one choice that there is: the program as the model wrote it."""
        return (Choice(),)

    def leanest(self, layout: Layout, cluster: Cluster) -> Choice:
        """Returns the same."""
        return Choice()

    def memory(self, layout: Layout, choice: Choice, cluster: Cluster) -> Memory:
        """Returns what one device holds at the peak of a step."""
        return self.peak_memory(layout, cluster)

    def time(self, layout: Layout, choice: Choice, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step."""
        return self.step_time(layout, cluster)

    def bound(self, layout: Layout, cluster: Cluster, most_microbatches: int) -> float:
        """Returns the seconds with the fewest microbatches that fit: more compute as much in
        smaller pieces and send as much more often, until replicas sum once a step."""
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
        apart = first(lambda one: one.reduces_once, fewest)
        return min(found, self.step_time(apart, cluster).total)

    def step_time(self, layout: Layout, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step.

        Raises:
            RuleError: If the rules cannot place the parameters.
            ConfigError: If the devices cannot multiply in the workload's precision.
        """
        width = jnp.dtype(self.precision.compute).itemsize
        return traced_time(
            *self.costs(layout),
            layout,
            cluster,
            self.software,
            "f32" if width == 4 else "bf16",
            self.constants,
        )

    def peak_memory(self, layout: Layout, cluster: Cluster) -> Memory:
        """Returns what one device holds at the peak of a step."""
        places = self.step.places(layout)
        params = jax.tree.leaves(self.step.params)
        gradients = sum(
            4.0 * math.prod(leaf.shape) / shards(place, layout)
            for leaf, place in zip(params, places["gradients"].values(), strict=True)
        )
        costs, _ = self.costs(layout)
        kept = min(costs.kept_bytes, costs.peak_bytes)
        return Memory(
            params=_held(layout, params, places["params"]),
            gradients=gradients,
            optimizer=_held(layout, jax.tree.leaves(self.step.opt_state), places["moments"]),
            activations=kept,
            recomputed=costs.peak_bytes - kept,
            gathered=self._gathered(layout, places["params"]),
            runtime=RUNTIME_BYTES[cluster.platform],
        )

    def costs(self, layout: Layout) -> tuple[Costs, Costs]:
        """Returns what one device does for a microbatch, and for the update after it."""
        traced = self.step
        # The program of another batch is the same with other sizes, as that of a microbatch is.
        if (2 * traced.batch) % self.batch or traced.batch % layout.batch_shards:
            traced = self._traced_anew
        return traced.costs(layout, layout.microbatches * traced.batch / self.batch)

    @functools.cached_property
    def _traced_anew(self) -> TracedStep:
        if self.batch == self.step.batch:
            return self.step
        return self.retrace(self.step.batch_of(self.batch)).step

    def _gathered(self, layout: Layout, places: Mapping[str, Placement]) -> float:
        """Bytes of the largest parameter gathered over `fsdp`, of the next one, and of its
        gradient."""
        if layout.fsdp == 1 or layout.zero < 3:
            return 0.0
        width = jnp.dtype(self.precision.compute).itemsize
        sizes = (
            math.prod(one.shape) / _stacked(one) / shards(one, layout, without="fsdp")
            for one in places.values()
        )
        return 3.0 * width * max(sizes, default=0.0)


def _stacked(placement: Placement) -> int:
    """Layers that a parameter holds, of which one is in use at a time."""
    names = placement.logical_axes or ()
    return placement.shape[0] if names[:1] == ("layers",) else 1


def _held(layout: Layout, leaves: Sequence[Any], places: Mapping[str, Placement]) -> float:
    return sum(
        nbytes(leaf) / shards(one, layout)
        for leaf, one in zip(leaves, places.values(), strict=True)
    )
