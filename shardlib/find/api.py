"""Rules found for a model that names no axes."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from shardlib.cost.layout import AXES, SHARDLIB, Layout
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.rates import rates_on
from shardlib.cost.pricing import by_joint_axes
from shardlib.errors import ConfigError, DoesNotFitError, MeshError, RuleError, did_you_mean
from shardlib.find.classes import Classes
from shardlib.find.found import FoundRules, Price
from shardlib.find.moves import Network
from shardlib.find.names import named_rules
from shardlib.find.problem import LayoutProblem, Objective
from shardlib.find.trace import INPUT, TracedLoss, trace_loss
from shardlib.find.traffic import predicted_traffic
from shardlib.functional import Inputs
from shardlib.functional.precision import Precision
from shardlib.functional.precision import precision as precision_named
from shardlib.hardware import Cluster, of_one_kind
from shardlib.mesh import MeshConfig, abstract_mesh, mesh_sizes
from shardlib.partitioner.layout import Dims, from_spec
from shardlib.plan.search import capacity_bytes
from shardlib.plan.workloads.traced import TracedWorkload
from shardlib.plan.workloads.tracing import LossFn, trace_workload
from shardlib.rules import FSDP, AxisRules
from shardlib.sharding.partition import place

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that cut the batch."""
PARAM_AXES = frozenset(("fsdp", "tensor"))
"""Mesh axes that may cut parameters."""
_SEARCHED = ("data", "fsdp", "tensor")


def find_rules(
    make: Callable[..., Any],
    *,
    loss: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    on: str | Cluster,
    mesh: str | MeshConfig | None = None,
    rules: AxisRules | None = None,
    inputs: Inputs = (),
    precision: str | Precision = "bf16",
    microbatches: int = 1,
    seconds: float = 60.0,
    memory_bytes: float | None = None,
    forbidden: Sequence[FoundRules] = (),
) -> FoundRules:
    """Returns the rules under which a model trains fastest on a cluster, by the cost model.

    The model need not name any axis. The loss is traced and its logical axes are discovered; an
    integer program chooses the layout of every tensor. Nothing is allocated or compiled. Print the
    result for a report, and train under `sl.use(found.mesh, found.rules)`.

    Args:
        make: Module factory as for `init_state`: `make(rngs) -> module`, or a linen module.
        loss: Loss as for `make_train_step`.
        batch: Arrays or `ShapeDtypeStruct`s of a whole step, rows first.
        optimizer: Any optax transformation.
        on: The cluster, such as `8xh100` or `v5p-128`.
        mesh: The mesh, of `data`, `fsdp` and `tensor`; if left out, the best of all that the
            cluster and the batch allow.
        rules: Rules that decide the parameters that they name, by their paths or by the metadata
            of the model. Their rules for activations are not read.
        inputs: Example arguments of the module; for linen.
        precision: Precision as for `make_train_step`.
        microbatches: Parts of a batch that run one after the other.
        seconds: The time limit for the integer program of one mesh.
        memory_bytes: Memory of a device for state and activations; that of the chip if left out.
        forbidden: Answers that are not given again: on the same mesh, at least a quarter of the
            layouts are others.

    The search of several processes may end at different answers if it is cut short by `seconds`:
    find rules once, and pass them on.

    Raises:
        MeshError: If the cluster, the mesh or the batch cannot be used.
        RuleError: If the given rules place parameters of one structure differently.
        DoesNotFitError: If no layout fits into the devices; it says how much is missing.
        PartitionError: If no answer was found in time.
        ModelError: If the model cannot be created, names axes of activations itself, or has
            parameters that are not trained.
        DataError: If a leaf of the batch has no rows.
        ConfigError: If `microbatches` or `seconds` is not positive.
    """
    if microbatches < 1 or seconds <= 0:
        raise ConfigError(
            f"microbatches is {microbatches} and seconds is {seconds}, but both must be positive."
        )
    cluster, dtypes = of_one_kind(on), precision_named(precision)
    traced = trace_loss(make, loss, batch, optimizer, inputs, dtypes)
    workload = trace_workload(
        make, optimizer, loss, batch, rules=rules or FSDP, inputs=inputs, precision=dtypes
    )
    classes = Classes(traced.program, traced.paths)
    capacity = capacity_bytes(cluster) if memory_bytes is None else memory_bytes
    search = _Search(
        traced, classes, workload, cluster, rules, microbatches, capacity, tuple(forbidden)
    )
    meshes = list(search.meshes()) if mesh is None else [_sizes(mesh, cluster)]
    return search.best(meshes, seconds)


def _sizes(mesh: str | MeshConfig, cluster: Cluster) -> dict[str, int]:
    sizes = mesh_sizes(abstract_mesh(mesh, cluster.num_devices))
    for axis, size in sizes.items():
        if size > 1 and axis not in _SEARCHED:
            raise MeshError(
                f"rules are found for meshes of {', '.join(_SEARCHED)}, and this one has "
                f"{axis}={size}.{did_you_mean(axis, _SEARCHED)}\n"
                f"  Leave {axis} out."
            )
    return {axis: sizes.get(axis, 1) for axis in _SEARCHED}


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search for the rules of one model on one cluster."""

    traced: TracedLoss
    classes: Classes
    workload: TracedWorkload
    cluster: Cluster
    given: AxisRules | None
    microbatches: int
    capacity_bytes: float
    forbidden: tuple[FoundRules, ...] = ()

    def meshes(self) -> Iterator[dict[str, int]]:
        """Yields the meshes that the cluster and the batch allow."""
        devices, domain = self.cluster.num_devices, self.cluster.devices_per_domain
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        for tensor, data in itertools.product(divisors, divisors):
            fsdp, left = divmod(devices, tensor * data)
            if left == 0 and tensor <= domain and self._divides(data * fsdp):
                yield {"data": data, "fsdp": fsdp, "tensor": tensor}

    def best(self, meshes: list[dict[str, int]], seconds: float) -> FoundRules:
        """Returns the rules of the mesh that the cost model of traced programs finds quickest.

        Raises:
            MeshError: If no mesh divides the batch.
            DoesNotFitError: If none fits.
        """
        rows, parts = self.workload.batch, self.microbatches
        meshes = [m for m in meshes if self._divides(m["data"] * m["fsdp"])]
        if not meshes:
            raise MeshError(
                f"data x fsdp of no mesh divides {rows} rows in {parts} microbatches.\n"
                f"  Give a multiple of {self.cluster.num_devices * parts} rows."
            )
        found: list[FoundRules] = []
        refused: list[DoesNotFitError] = []
        for sizes in meshes:
            try:
                found.append(self.on_mesh(sizes, seconds))
            except DoesNotFitError as error:
                refused.append(error)
        if not found:
            raise min(refused, key=lambda error: error.needed_bytes)
        # Devices along an axis that no rule names would all compute the same.
        devices = self.cluster.num_devices
        busy = [f for f in found if not f.rules.idle(abstract_mesh(f.mesh_text, devices))]
        return min(busy or found, key=lambda one: one.prices[0].seconds)

    def _divides(self, shards: int) -> bool:
        return self.workload.batch % (shards * self.microbatches) == 0

    def on_mesh(self, sizes: dict[str, int], seconds: float) -> FoundRules:
        """Returns the rules for one mesh."""
        layout = dataclasses.replace(Layout.of(sizes), microbatches=self.microbatches)
        objective = self._objective(layout)
        problem = LayoutProblem(self.classes, objective)
        for other in self.forbidden:
            if other.sizes == sizes:
                problem.forbid(other.solution)
        solution = problem.solve(seconds)
        named = named_rules(self.classes, solution, self.traced.paths, self.traced.module.axes)
        prices = [self._price(f"found, {layout}", named.rules, layout)]
        if self.given is None and self._divides(layout.num_devices):
            alone = Layout(fsdp=layout.num_devices, microbatches=self.microbatches)
            prices.append(self._price(f"fsdp={layout.num_devices}", FSDP, alone))
        return FoundRules(
            sizes,
            self.cluster.name,
            named.rules,
            self.classes,
            named.by_class,
            solution,
            tuple(prices),
            objective.capacity_bytes,
            predicted_traffic(problem, solution),
        )

    def _price(self, name: str, rules: AxisRules, layout: Layout) -> Price:
        step = dataclasses.replace(self.workload.step, rules=rules)
        workload = dataclasses.replace(self.workload, step=step)
        return Price(
            name,
            workload.step_time(layout, self.cluster).total,
            workload.peak_memory(layout, self.cluster).total,
        )

    def _objective(self, layout: Layout) -> Objective:
        links_of = by_joint_axes(layout, self.cluster, committed(), SHARDLIB)
        wide = jnp.dtype(self.workload.precision.compute).itemsize == 4
        cut = [axis for axis in reversed(AXES) if layout.size(axis) > 1]
        batch = tuple(axis for axis in BATCH_AXES if layout.size(axis) > 1)
        pinned = {
            number: batch
            for number, axis in enumerate(self.classes.axes)
            if any(t.pattern.startswith(INPUT) and t.dim == 0 for t in axis.touches)
        }
        return Objective(
            network=Network({axis: links_of((axis,))[0] for axis in cut}),
            rates=rates_on(self.cluster, "f32" if wide else "bf16", committed()),
            state_bytes=self.traced.state_bytes,
            saved_scale=self._saved_scale(layout),
            capacity_bytes=self.capacity_bytes,
            param_axes=PARAM_AXES,
            batch_axes=frozenset(batch),
            pinned_axes=pinned,
            pinned_params=self._pinned_params(layout),
            microbatches=layout.microbatches,
        )

    def _saved_scale(self, layout: Layout) -> float:
        """Returns the part of the activations that is held at the peak: what the traced step holds
        with the batch cut alone, over the operands of its products."""
        counted = sum(tensor.saved_bytes for tensor in self.classes.tensors) / layout.batch_shards
        alone = dataclasses.replace(layout, tensor=1)
        memory = self.workload.peak_memory(alone, self.cluster)
        held = memory.total - memory.params - memory.gradients - memory.optimizer
        return held / counted if counted else 0.0

    def _pinned_params(self, layout: Layout) -> dict[int, Dims]:
        """Returns the layouts of parameters that the given rules decide."""
        if self.given is None:
            return {}
        mesh = abstract_mesh(str(layout), layout.num_devices)
        placed = place(self.traced.params, self.traced.module.axes, self.given, mesh)
        decided: dict[int, dict[Dims | None, str]] = collections.defaultdict(dict)
        for (path, one), number in zip(placed.items(), self.classes.arguments, strict=False):
            is_given = one.origin != "auto"
            dims = from_spec(one.spec, len(one.shape)).dims if is_given else None
            decided[number].setdefault(dims, path)
        for layouts in decided.values():
            if len(layouts) > 1:
                raise RuleError(
                    f"{', '.join(layouts.values())} have one structure and get one layout, but the "
                    "given rules place them differently.\n"
                    "  Give all of them the same rule, or none."
                )
        return {n: dims for n, layouts in decided.items() for dims in layouts if dims is not None}
