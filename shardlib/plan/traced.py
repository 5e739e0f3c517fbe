"""A traced step as a workload of the search: what it costs and holds on any layout."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardlib.errors import RuleError
from shardlib.functional import FunctionalModule
from shardlib.hardware import Cluster
from shardlib.mesh import entry_axes
from shardlib.partition import Placement, place, place_optimizer
from shardlib.paths import path_string
from shardlib.plan.constants import committed
from shardlib.plan.cost import StepTime
from shardlib.plan.jaxpr_costs import Costs, Walk
from shardlib.plan.jaxpr_layout import MICRO, Laid, Spec, Spreading, nbytes, replicated
from shardlib.plan.layout import AXES, SHARDLIB, Layout, Software
from shardlib.plan.memory import Memory
from shardlib.plan.problem import Choice
from shardlib.plan.traced_time import traced_time
from shardlib.precision import Precision
from shardlib.rules import AxisRules
from shardlib.rules.resolve import ANY

BatchAxes = Mapping[str, tuple[str | None, ...]]
_RUNTIME_BYTES = {"tpu": 0.5e9, "gpu": 2.0e9, "cpu": 0.0}


@dataclasses.dataclass(frozen=True, eq=False)
class TracedWorkload:
    """One step of a traced model, as the search wants it: a `Workload`."""

    gradient: Any
    """The jaxpr of the gradients of a batch: of parameters, model state, batch and key."""
    update: Any
    """The jaxpr of the update: of gradients, optimizer state and parameters."""
    module: FunctionalModule
    params: Any
    """Shapes, in the dtype in which they are stored."""
    model_state: Any
    opt_state: Any
    examples: Any
    """Shapes of the batch."""
    rules: AxisRules
    precision: Precision
    batch_axes: BatchAxes
    names: frozenset[str]
    """Logical axes that the model names."""
    retrace: Callable[[Any], "TracedWorkload"]
    """Traces the same for a batch of other shapes."""
    software: Software = SHARDLIB
    constants: Mapping[str, float] = dataclasses.field(default_factory=committed)

    @property
    def batch(self) -> int:
        """Examples of a step, over all devices."""
        return jax.tree.leaves(self.examples)[0].shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of a step where the batch has a length, else its examples."""
        return self.batch * self._length

    @property
    def unit(self) -> str:
        """What `tokens` counts."""
        if self._length > 1:
            return "tokens"
        ranks = [len(leaf.shape) for leaf in jax.tree.leaves(self.examples)]
        return "images" if max(ranks) == 4 else "examples"

    @functools.cached_property
    def flops(self) -> float:
        """FLOPs of matmuls and convolutions of a step, over all devices, without what is computed
        again and without the optimizer's."""
        return self.costs(Layout())[0].flops("forward", "backward")

    def with_batch(self, batch: int) -> "TracedWorkload":
        """Returns the same with another number of examples in a step, traced anew."""
        if batch == self.batch:
            return self
        return self.retrace(
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((batch, *leaf.shape[1:]), leaf.dtype),
                self.examples,
            )
        )

    def relaxed(self) -> "TracedWorkload":
        """Returns the same: there are no choices that change the numbers."""
        return self

    @property
    def num_layers(self) -> int:
        """1: the program recomputes what its model says."""
        return 1

    @property
    def num_params(self) -> int:
        """Trained numbers."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))

    def degrees(self, axis: str, most: int) -> Sequence[int]:
        """Returns the degrees, up to `most` and dividing it, that a mesh axis may have."""
        if axis == "stage" or axis not in self._used_axes:
            return (1,)
        sizes = [n for n in range(1, most + 1) if most % n == 0]
        return [n for n in sizes if not self.faults(dataclasses.replace(Layout(), **{axis: n}))]

    def variants(self, layout: Layout) -> Sequence[Layout]:
        """Returns a layout with parameters over `fsdp`, and with whole ones."""
        stages = (3, 1) if layout.fsdp > 1 else (3,)
        return [dataclasses.replace(layout, zero=zero) for zero in stages]  # type: ignore[arg-type]

    def faults(self, layout: Layout) -> list[str]:
        """Returns why a layout cannot be run, as sentences."""
        if layout.stage > 1:
            return [f"stage={layout.stage}: a traced program is not cut into stages"]
        idle = [a for a in AXES if layout.size(a) > 1 and a not in self._used_axes]
        if idle:
            return [
                f"{a}={layout.size(a)}: the rules put nothing of this model on it" for a in idle
            ]
        try:
            self.places(layout)
            self._batch_laid(layout)
        except RuleError as error:
            return str(error).splitlines()
        parts = layout.batch_shards * layout.microbatches
        if self.batch % parts:
            return [f"data+fsdp+expert and microbatches cut {self.batch} examples into {parts}"]
        return []

    def choices(self, layout: Layout) -> Sequence[Choice]:
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
        """Returns the seconds with one microbatch: more take no less."""
        return self.step_time(dataclasses.replace(layout, microbatches=1), cluster).total

    def step_time(self, layout: Layout, cluster: Cluster) -> StepTime:
        """Returns the seconds of a step.

        Raises:
            RuleError: If the rules cannot place the parameters.
            ConfigError: If the devices cannot multiply in the workload's precision.
        """
        return traced_time(
            *self.costs(layout), layout, cluster, self.software, self._precision, self.constants
        )

    def peak_memory(self, layout: Layout, cluster: Cluster) -> Memory:
        """Returns what one device holds at the peak of a step."""
        places = self.places(layout)
        spread = self._spread(layout)
        params = jax.tree.leaves(self.params)
        gradients = sum(
            4.0 * math.prod(leaf.shape) / spread.shards(_axes(place.spec))
            for leaf, place in zip(params, places["gradients"].values(), strict=True)
        )
        costs, _ = self.costs(layout)
        kept = min(costs.kept_bytes, costs.peak_bytes)
        return Memory(
            params=_held(spread, params, places["params"]),
            gradients=gradients,
            optimizer=_held(spread, jax.tree.leaves(self.opt_state), places["moments"]),
            activations=kept,
            recomputed=costs.peak_bytes - kept,
            gathered=self._gathered(layout, spread, places["params"]),
            runtime=_RUNTIME_BYTES[cluster.platform],
        )

    def costs(self, layout: Layout) -> tuple[Costs, Costs]:
        """Returns what one device does for a microbatch, and for the update after it."""
        return self._costs(dataclasses.replace(layout, slices=1))

    def places(self, layout: Layout) -> Mapping[str, Mapping[str, Placement]]:
        """Returns where parameters, gradients and optimizer state lie.

        Raises:
            RuleError: If the rules cannot place them.
        """
        return self._places(tuple(layout.size(axis) for axis in AXES), layout.zero)

    @functools.cached_property
    def _length(self) -> int:
        """Size of the dim that the batch calls `length`; 1 where none is called so."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.examples):
            axes = self.batch_axes.get(path_string(path), ())
            if "length" in axes:
                return leaf.shape[axes.index("length")]
        return 1

    @functools.cached_property
    def _used_axes(self) -> frozenset[str]:
        """Mesh axes that the rules give to axes that the model names."""
        found = {
            name
            for kind in ("params", "activations")
            for logical, alternatives in self.rules.table(kind)  # type: ignore[arg-type]
            if logical in self.names or logical == ANY
            for alternative in alternatives
            for name in alternative
        }
        auto = self.rules.auto.mesh_axis if self.rules.auto else None
        return frozenset(found | ({auto} if auto else set()))

    @functools.cached_property
    def _precision(self) -> Any:
        return "f32" if jnp.dtype(self.precision.compute).itemsize == 4 else "bf16"

    @functools.cached_property
    def _costs(self) -> Any:
        return functools.lru_cache(4096)(self._counted)

    @functools.cached_property
    def _places(self) -> Any:
        return functools.lru_cache(1024)(self._placed)

    def _placed(self, sizes: tuple[int, ...], zero: int) -> dict[str, dict[str, Placement]]:
        mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        whole = place(self.params, self.module.axes, self.rules, mesh)
        gradients = place(self.params, self.module.axes, self.rules.of("gradients"), mesh)
        moments = place(self.params, self.module.axes, self.rules.of("opt_state"), mesh)
        if zero < 3:
            whole = {path: _unsharded(one) for path, one in whole.items()}
        if zero < 2:
            gradients = {path: _unsharded(one) for path, one in gradients.items()}
        return {
            "params": whole,
            "gradients": gradients,
            "updates": moments,
            "moments": place_optimizer(self.opt_state, moments),
        }

    def _spread(self, layout: Layout, *, in_time: bool = True) -> Spreading:
        sizes = {axis: layout.size(axis) for axis in AXES}
        named = dict(sizes)
        if in_time:
            sizes[MICRO] = layout.microbatches

        def resolve(names: tuple[str | None, ...], shape: tuple[int, ...], kind: str) -> Spec:
            found = self.rules.resolve(names, shape, named, kind)  # type: ignore[arg-type]
            return _spec(found.spec, len(shape))

        return Spreading(sizes, resolve, lambda _: None)

    def _batch_laid(self, layout: Layout) -> list[Laid]:
        sizes = {axis: layout.size(axis) for axis in AXES}
        found = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.examples):
            rank = len(leaf.shape)
            axes = self.batch_axes.get(path_string(path), ("batch", *[None] * (rank - 1))[:rank])
            spec = _spec(self.rules.spec(axes, leaf.shape, sizes, "activations"), rank)
            spec = tuple(
                (*cut, MICRO) if name == "batch" else cut
                for name, cut in zip(axes, spec, strict=True)
            )
            found.append(Laid(spec))
        return found

    def _counted(self, layout: Layout) -> tuple[Costs, Costs]:
        places = self.places(layout)
        spread = self._spread(layout)
        count = len(jax.tree.leaves(self.params))
        laids = [
            *_laid(places["params"], is_param=True),
            *(replicated(leaf) for leaf in jax.tree.leaves(self.model_state)),
            *self._batch_laid(layout),
        ]
        jaxpr = self.gradient
        laids += [replicated(var.aval) for var in jaxpr.invars[len(laids) :]]
        constants = [replicated(var.aval) for var in jaxpr.constvars]
        walk = Walk(spread.sizes, spread.resolve)
        outs, costs = walk.run(jaxpr, (*constants, *laids), apart=count)
        self._sum_gradients(layout, spread, costs, outs[:count])
        return costs, self._update_costs(layout, places)

    def _sum_gradients(
        self, layout: Layout, spread: Spreading, costs: Costs, outs: Sequence[Laid]
    ) -> None:
        wanted = self.places(layout)["gradients"].values()
        recorder = dataclasses.replace(
            spread, moved=lambda moved: costs.moved.update({("backward", moved): 1})
        )
        for leaf, laid, place_ in zip(jax.tree.leaves(self.params), outs, wanted, strict=True):
            aval = jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
            one = dataclasses.replace(laid, is_param=True)
            recorder.relaid(aval, one, _spec(place_.spec, len(leaf.shape)))

    def _update_costs(self, layout: Layout, places: Mapping[str, Mapping[str, Placement]]) -> Costs:
        spread = self._spread(layout, in_time=False)
        laids = [
            *_laid(places["updates"]),
            *_laid(places["moments"]),
            *_laid(places["updates"]),
        ]
        jaxpr = self.update
        constants = [replicated(var.aval) for var in jaxpr.constvars]
        walk = Walk(spread.sizes, spread.resolve)
        outs, costs = walk.run(jaxpr, (*constants, *laids))
        recorder = dataclasses.replace(
            spread, moved=lambda moved: costs.moved.update({("forward", moved): 1})
        )
        for leaf, laid, place_ in zip(
            jax.tree.leaves(self.params), outs, places["params"].values(), strict=False
        ):
            recorder.relaid(
                leaf,
                dataclasses.replace(laid, is_param=True),
                _spec(place_.spec, len(leaf.shape)),
            )
        return costs

    def _gathered(
        self, layout: Layout, spread: Spreading, places: Mapping[str, Placement]
    ) -> float:
        """Bytes of the largest parameter gathered over `fsdp`, of the next one, and of its
        gradient."""
        if layout.fsdp == 1 or layout.zero < 3:
            return 0.0
        width = jnp.dtype(self.precision.compute).itemsize
        sizes = (
            math.prod(one.shape)
            / _stacked(one)
            / spread.shards(tuple(a for a in _axes(one.spec) if a != "fsdp"))
            for one in places.values()
        )
        return 3.0 * width * max(sizes, default=0.0)


def _spec(spec: Any, rank: int) -> Spec:
    found = [entry_axes(entry) for entry in spec]
    return (*found, *((),) * (rank - len(found)))


def _axes(spec: Any) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def _laid(places: Mapping[str, Placement], *, is_param: bool = False) -> list[Laid]:
    return [Laid(_spec(one.spec, len(one.shape)), (), is_param) for one in places.values()]


def _stacked(placement: Placement) -> int:
    """Layers that a parameter holds, of which one is in use at a time."""
    names = placement.logical_axes or ()
    return placement.shape[0] if names[:1] == ("layers",) else 1


def _unsharded(placement: Placement) -> Placement:
    """A parameter that `fsdp` does not cut."""
    entries = [
        tuple(a for a in entry_axes(entry) if a != "fsdp") or None for entry in placement.spec
    ]
    resolution = placement.resolution._replace(spec=PartitionSpec(*entries))
    return dataclasses.replace(placement, resolution=resolution)


def _held(spread: Spreading, leaves: Sequence[Any], places: Mapping[str, Placement]) -> float:
    return sum(
        nbytes(leaf) / spread.shards(_axes(one.spec))
        for leaf, one in zip(leaves, places.values(), strict=True)
    )
