"""The search over meshes for the rules of one model on one cluster."""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping

import jax.numpy as jnp

from shardlib.cost.layout import AXES, SHARDLIB, Layout
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.rates import rates_on
from shardlib.cost.pricing import by_joint_axes
from shardlib.cost.traced.rules import PARAMS_TABLE
from shardlib.errors import DoesNotFitError, MeshError, PartitionError, RuleError
from shardlib.find.classes import Classes
from shardlib.find.found import FoundRules, Price
from shardlib.find.moves import Network
from shardlib.find.named_choices import Cut
from shardlib.find.names import named_rules
from shardlib.find.problem import LayoutProblem, Objective, Solution
from shardlib.find.questions import Questions
from shardlib.find.trace import INPUT, TracedLoss, fsdp_alone
from shardlib.find.traffic import predicted_traffic
from shardlib.hardware import Cluster
from shardlib.mesh import abstract_mesh
from shardlib.partitioner.layout import Dims, from_spec
from shardlib.plan.workloads.traced import TracedWorkload
from shardlib.rules import SEQUENCE, STANDARD, AxisRules
from shardlib.sharding.partition import place

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that cut the batch."""
PARAM_AXES = frozenset(("fsdp", "tensor"))
"""Mesh axes that may cut parameters."""
SEARCHED = ("data", "fsdp", "tensor")
_BY_HAND = {"standard": STANDARD, "sequence": SEQUENCE}
"""Rules that are tried too for a model that has their names."""
_NEAR = 0.05
"""Share of a step by which they must be quicker: both cost models err by a few percent."""


@dataclasses.dataclass(frozen=True)
class Search:
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
        """Returns the rules for one mesh: by the cost model of traced programs the quickest of what
        the integer program finds, and of rules written by hand for the names of the model."""
        layout = dataclasses.replace(Layout.of(sizes), microbatches=self.microbatches)
        objective = self._objective(layout)
        problem = LayoutProblem(self.classes, objective)
        for other in self.forbidden:
            if other.sizes == sizes:
                problem.forbid(other.solution)
        solutions = {"found": problem.solution(seconds)} | dict(self._by_hand(problem, seconds))
        answers = {}
        for name, solution in solutions.items():
            named = named_rules(self.classes, solution, self.traced.paths, self.traced.module.axes)
            price = self._price(f"{name}, {layout}", named.rules, layout)
            answers[name] = price, named, solution
        own = answers["found"]
        ranked = sorted(
            answers.values(),
            key=lambda answer: answer[0].seconds - _NEAR * own[0].seconds * (answer is own),
        )
        _, named, solution = ranked[0]
        prices = [price for price, *_ in ranked]
        if self.given is None and self._divides(layout.num_devices):
            alone = Layout(fsdp=layout.num_devices, microbatches=self.microbatches)
            rules = fsdp_alone(self.traced.module.axes)
            prices.append(self._price(f"fsdp={layout.num_devices}", rules, alone))
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
            Questions(problem, solution, named.by_class, seconds),
            self.compared,
        )

    def compared(
        self, name: str, rules: AxisRules, sizes: Mapping[str, int]
    ) -> tuple[Price, dict[str, str]]:
        """Returns the price of other rules on a mesh, and how they place each parameter."""
        layout = dataclasses.replace(Layout.of(sizes), microbatches=self.microbatches)
        mesh = abstract_mesh(str(layout), layout.num_devices)
        placed = place(self.traced.params, self.traced.module.axes, rules, mesh)
        shown = {
            path: ", ".join("+".join(axes) or "-" for axes in from_spec(p.spec, len(p.shape)).dims)
            for path, p in placed.items()
        }
        return self._price(name, rules, layout), shown

    def _by_hand(self, problem: LayoutProblem, seconds: float) -> Iterator[tuple[str, Solution]]:
        """Yields the solutions of rules written by hand that have all names of the model."""
        columns = problem.named.columns
        for preset, rules in _BY_HAND.items() if columns and self.given is None else ():
            cuts = {name: _cut_of(name, rules, columns[name]) for name in columns}
            known = {name: cut for name, cut in cuts.items() if cut is not None}
            if len(known) < len(columns):
                continue
            try:
                yield preset, problem.solution(seconds, known)
            except (DoesNotFitError, PartitionError):
                continue

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


def _cut_of(name: str, rules: AxisRules, cuts: Collection[Cut]) -> Cut | None:
    """Returns what rules say about a name, of the cuts that are possible; None if they say nothing
    or something else."""
    kind = "params" if name.startswith(PARAMS_TABLE) else "activations"
    alternatives = dict(rules.table(kind)).get(name.removeprefix(PARAMS_TABLE))
    if alternatives is None:
        return None
    known = set().union(*cuts)
    wanted = known.intersection(alternatives[0])
    return next((cut for cut in cuts if set(cut) == wanted), None)
