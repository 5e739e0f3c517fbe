"""The search for the rules of one traced model on a mesh."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardlib.cost.costs import RUNTIME_BYTES
from shardlib.cost.layout import AXES, SHARDLIB, Layout, divisors
from shardlib.cost.machine.constants import committed
from shardlib.cost.machine.rates import Rates, rates_on
from shardlib.cost.pricing import by_joint_axes
from shardlib.cost.traced.primitives import PARAMS_TABLE
from shardlib.errors import ConfigError, DoesNotFitError, MeshError, PartitionError, RuleError
from shardlib.find.bounds import MeshBound
from shardlib.find.context import CONTEXT, FoundRows, rows_of
from shardlib.find.equivalence import Classes
from shardlib.find.experts import EXPERT, NONE, FoundExperts, experts_of
from shardlib.find.found import SURE, FoundRules, Price
from shardlib.find.given import pinned_params
from shardlib.find.lowered import lowered
from shardlib.find.moves import Network
from shardlib.find.named_choices import Cut
from shardlib.find.names import NamedAxes, named_rules
from shardlib.find.opt_state import updates_apart
from shardlib.find.problem import LayoutProblem, Objective, Solution
from shardlib.find.stages import FoundStages, stages_of
from shardlib.find.trace import GRADIENT_BYTES, INPUT, TracedLoss, fsdp_alone
from shardlib.find.traffic import Traffic, counted_traffic, predicted_traffic
from shardlib.find.why_not import Questions
from shardlib.hardware import Cluster
from shardlib.mesh import abstract_mesh
from shardlib.partitioner.layout import Dims, from_spec
from shardlib.plan.workloads.traced import TracedWorkload
from shardlib.rules import SEQUENCE, STANDARD, AxisRules
from shardlib.rules.resolve import STAGE
from shardlib.sharding.partition import place

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes that cut the batch."""
PARAM_AXES = frozenset(("fsdp", "tensor"))
"""Mesh axes that may cut any dim of parameters."""
SEARCHED = (STAGE, "data", "fsdp", "expert", "context", "tensor")
_BY_HAND = {"standard": STANDARD, "sequence": SEQUENCE}
"""Rules that are tried too for a model that has their names."""
_FSDP, _ZERO1, _ZERO2 = "fsdp alone", "zero1", "zero2"
_BONUS = {
    **dict.fromkeys(("found", _FSDP), SURE),
    **dict.fromkeys(("nested", "whole sequences"), SURE + 0.02),
    **dict.fromkeys((_ZERO1, _ZERO2), SURE - 0.02),
}
"""Shares of a step by which other answers must be quicker. TPU compilers turn some scattered sums
behind a move of a weight's gradient into whole ones, which `nested` moves avoid. Optimizer state in
more parts also leaves more memory."""
_FAR = 1.3
"""Times the seconds of the best answer by the integer program beyond which none is lowered."""
_ROWS = "rows over tensor"
_IDLE = "without tensor"
_STATE_AXES = ("fsdp", "data")
"""Mesh axes that may cut optimizer state where they cut no parameter."""


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for the rules of one traced model on meshes of a cluster."""

    traced: TracedLoss
    classes: Classes
    workload: TracedWorkload
    cluster: Cluster
    given: AxisRules | None
    microbatches: int | None
    """None to search for them."""
    capacity_bytes: float
    forbidden: tuple[FoundRules, ...] = ()
    remat: str | None = None
    """The name of the rematerialisation; None if only one is known."""
    searches_stages: bool = True
    """Whether `meshes` has pipelines."""

    def meshes(self) -> Iterator[dict[str, int]]:
        """Yields the meshes that the cluster allows. `expert` and `tensor`, which both cut experts,
        take turns, and so do `context` and replicas. Stages are of `data`, `fsdp` and `tensor`."""
        devices, domain = self.cluster.num_devices, self.cluster.devices_per_domain
        # The program does not show what a manual region sends.
        count = 1 if self._experts.in_region else self._experts.count
        degrees = divisors(math.gcd(devices, count)) if count else [1]
        shared = [n for n in divisors(devices) if n == 1 or not self._unshared(n)]
        stages = [n for n in divisors(devices) if n == 1 or self._can_cut(n)]
        for stage, expert, context, tensor, data in itertools.product(
            stages, degrees, shared, *[divisors(devices)] * 2
        ):
            fsdp, left = divmod(devices, stage * expert * context * tensor * data)
            # Devices that share rows can share the state of replicas as well.
            one = 1 in (expert, tensor) and 1 in (context, data * expert)
            one = one and 1 in (stage, expert * context)
            if left == 0 and tensor <= domain and one:
                sizes = stage, data, fsdp, expert, context, tensor
                yield dict(zip(SEARCHED, sizes, strict=True))

    @functools.cached_property
    def _experts(self) -> FoundExperts:
        return experts_of(self.classes)

    @functools.cached_property
    def _rows(self) -> FoundRows:
        return rows_of(self.classes, self.traced.unshared)

    @functools.cached_property
    def stages(self) -> FoundStages:
        """The layers that stages of a pipeline divide."""
        return stages_of(self.classes, self.traced.stacks, self.traced.updated)

    def _can_cut(self, stages: int) -> bool:
        parts = self.microbatches
        is_enough = parts is None or parts >= stages
        is_asked = self.searches_stages and self.given is None
        return is_asked and is_enough and self.stages.is_worth(stages)

    @functools.cached_property
    def batch_rows(self) -> dict[str, int]:
        """The rows of each leaf of the batch, by path."""
        pairs = zip(self.traced.paths, self.traced.program.inputs, strict=True)
        return {
            path.removeprefix(INPUT) or "the batch": tensor.aval.shape[0]
            for path, tensor in pairs
            if path.startswith(INPUT)
        }

    def _divides(self, parts: int) -> bool:
        """Returns whether all leaves of the batch have a number of rows that `parts` divides."""
        return all(rows % parts == 0 for rows in self.batch_rows.values())

    @functools.cached_property
    def _updates_apart(self) -> bool:
        return updates_apart(self.workload.step.update)

    def _unshared(self, devices: int) -> list[str]:
        """Returns why devices along `context` cannot share the rows of the model."""
        return list(dict.fromkeys(self._rows.faults(devices)))

    def checked(self, sizes: dict[str, int]) -> dict[str, int]:
        """Returns the mesh; raises `MeshError` if its axis of stages, of experts or of positions
        has nothing to cut."""
        self._check_stages(sizes[STAGE])
        shared = sizes[CONTEXT]
        if shared > 1 and (faults := self._unshared(shared)):
            raise MeshError(
                f"{self.traced.module.name} cannot cut rows over {CONTEXT}={shared}: "
                f"{'; '.join(faults)}.\n"
                f"  Leave {CONTEXT} out, or let attention on rows of a power of two go through "
                "attend."
            )
        size, count = sizes[EXPERT], self._experts.count
        if size == 1 or (count and count % size == 0):
            return sizes
        what = f"its experts are {count} a layer" if count else "it sends no rows to experts"
        fix = f"Give a divisor of {count}." if count else f"Leave {EXPERT} out."
        raise MeshError(
            f"the mesh has {EXPERT}={size}, which must divide the experts of "
            f"{self.traced.module.name}, but {what}.\n  {fix}"
        )

    def _check_stages(self, stages: int) -> None:
        if stages == 1:
            return
        name = self.traced.module.name
        if self.given is not None:
            raise MeshError(
                f"the mesh has {STAGE}={stages}, but stages are found for models without given "
                f"rules.\n  Leave out {STAGE}, or the rules for {name}."
            )
        if self.microbatches is not None and self.microbatches < stages:
            raise MeshError(
                f"{self.microbatches} microbatches leave some of {STAGE}={stages} without work.\n"
                f"  Use microbatches={stages} or more, or fewer stages."
            )
        if faults := self.stages.faults(stages):
            reasons = "\n".join(faults)
            raise MeshError(f"{name} cannot be cut into {STAGE}={stages}: {reasons}")

    def microbatch_counts(self, sizes: Mapping[str, int]) -> list[int]:
        """Returns the possible numbers of microbatches, ascending; of a pipeline at least one for
        each stage."""
        rows, left = divmod(math.gcd(*self.batch_rows.values()), Layout.of(sizes).batch_shards)
        if left:
            return []
        counts = divisors(rows) if self.microbatches is None else [self.microbatches]
        return [n for n in counts if n >= sizes[STAGE] and rows % n == 0]

    def least_bytes(self, sizes: Mapping[str, int], microbatches: int) -> float:
        """Returns bytes that a device holds at least: state and saved activations in all pieces."""
        layout = dataclasses.replace(Layout.of(sizes), microbatches=microbatches)
        tensors = self.classes.tensors
        saved = self._saved_scale(layout) * sum(tensor.saved_bytes for tensor in tensors)
        return self._held_bytes(sizes) + saved * layout.stage / layout.num_devices

    def _held_bytes(self, sizes: Mapping[str, int]) -> float:
        """Returns bytes of state that a device holds at least: in all pieces, but for those over
        `data`, which cuts optimizer state alone."""
        kept = self.traced.state_bytes - self.traced.moment_bytes - GRADIENT_BYTES
        trained = kept + (self.traced.state_bytes - kept) / sizes["data"]
        held = sum(
            t.elements
            * t.copies
            * (trained if t.trained else t.width)
            / (sizes[EXPERT] if number in self._experts.dims else 1)
            / (sizes[STAGE] if number in self.stages.params else 1)
            for number, t in enumerate(self.classes.tensors)
        )
        return held / (sizes["fsdp"] * sizes["tensor"])

    def state_bytes(self, sizes: Mapping[str, int]) -> float:
        """Returns bytes that a device holds at least besides activations."""
        return self._held_bytes(sizes) + RUNTIME_BYTES[self.cluster.platform]

    def state_fits(self, sizes: Mapping[str, int]) -> bool:
        """Returns whether the state alone fits; otherwise there is nothing to solve."""
        return self.state_bytes(sizes) <= self.capacity_bytes

    def least_seconds(self, sizes: Mapping[str, int], microbatches: int) -> float:
        """Returns the seconds that a step takes at least: those on one device, over the devices.

        A device of a mesh computes on pieces of the same arrays, of which each has the same bytes
        and FLOPs in all, or more where devices have the same piece. A kernel needs at least the
        part of its seconds for a piece: it starts as often, and pads more.

        Stages run the forward pass of their layers twice, and idle for the time of a microbatch for
        each other stage. The layers have their part of all kernels, as of products.
        """
        whole, update, forward = (seconds / self.cluster.num_devices for seconds in self._alone)
        if sizes[STAGE] == 1:
            return whole
        idle = (sizes[STAGE] - 1) / microbatches * (whole - update + forward)
        return whole + self.stages.part_of_flops * (forward + idle)

    @functools.cached_property
    def _alone(self) -> tuple[float, float, float]:
        """Seconds of a step, of its update and of its forward pass on one device."""
        time = self.workload.step_time(Layout(), self.cluster)
        return time.total, time.optimizer, self.workload.forward_seconds(self.cluster)

    def extra_seconds(self, sizes: Mapping[str, int], microbatches: int) -> float:
        """Returns seconds that a step takes at least on a mesh besides `least_seconds`, also with
        more recomputation."""
        return self._bound(tuple(sizes.items())).extra_seconds(microbatches)

    @functools.cached_property
    def _bound(self) -> Callable[[tuple[tuple[str, int], ...]], MeshBound]:
        def bound(sizes: tuple[tuple[str, int], ...]) -> MeshBound:
            objective = self._objective(Layout.of(dict(sizes)))
            free = dataclasses.replace(objective, capacity_bytes=math.inf)
            return MeshBound.of(LayoutProblem(self.classes, free))

        return functools.cache(bound)

    @functools.cached_property
    def _rates(self) -> Rates:
        wide = jnp.dtype(self.workload.precision.compute).itemsize == 4
        return rates_on(self.cluster, "f32" if wide else "bf16", committed())

    def on_mesh(
        self, sizes: dict[str, int], microbatches: int, seconds: float, *, alone: bool
    ) -> FoundRules:
        """Returns the rules for one mesh: the quickest of what the integer program finds, and of
        rules written by hand for the names of the model. `seconds` limits each solution. A
        mesh that is `alone` gets more answers, and the program that a device runs is priced."""
        layout = dataclasses.replace(Layout.of(sizes), microbatches=microbatches)
        lowers = self._lowers(layout, alone)
        problem, best, name = self._first(self._objective(layout), layout, sizes, seconds)
        own = self._answer(name, problem, best, layout, lowers)
        answers = [own]
        for name, solution in self._by_hand(problem, seconds):
            answers.append(self._answer(name, problem, solution, layout, lowers))
        for name, objective in self._otherwise(problem.objective, layout, own, alone):
            with contextlib.suppress(DoesNotFitError, PartitionError):
                other = self._problem(objective, sizes)
                solution = other.solution(seconds)
                if solution.seconds < _FAR * best.seconds:
                    answer = self._answer(name, other, solution, layout, lowers)
                    if not self._is_needless(answer):
                        answers.append(answer)

        def rank(answer: _Answer) -> tuple[bool, float]:
            bonus = _BONUS.get(answer.name, 0.0) * own.price.rank
            return answer.price.memory_bytes > self.capacity_bytes, answer.price.rank - bonus

        ranked = sorted(answers, key=rank)
        chosen = ranked[0]
        prices = [answer.price for answer in ranked]
        unstaged = self.given is None and layout.stage == 1
        if unstaged and self._divides(layout.num_devices * microbatches):
            fsdp = Layout(fsdp=layout.num_devices, microbatches=microbatches)
            rules = fsdp_alone(self.traced.module.axes)
            prices.append(self._price(f"fsdp={layout.num_devices}", rules, fsdp, lowers))
        return FoundRules(
            sizes,
            self.cluster.name,
            chosen.named.rules,
            self.classes,
            chosen.named.by_class,
            chosen.solution,
            tuple(prices),
            self.capacity_bytes,
            chosen.traffic,
            # These two leave out what can be asked about.
            Questions(
                problem if chosen.name in (_IDLE, _FSDP) else chosen.problem,
                chosen.solution,
                chosen.named.by_class,
                seconds,
            ),
            functools.partial(self.compared, microbatches),
            self.remat,
        )

    def _is_needless(self, answer: "_Answer") -> bool:
        """Returns whether an answer does not do what it is for, or was forbidden under another
        name: the preset's answer leaves activations out of its rules."""
        rules = answer.named.rules
        is_apart = answer.name in (_ZERO1, _ZERO2)
        return (is_apart and rules.opt_state is None) or any(
            rules == other.rules for other in self.forbidden
        )

    def _first(
        self, objective: Objective, layout: Layout, sizes: dict[str, int], seconds: float
    ) -> tuple[LayoutProblem, Solution, str]:
        """Returns the best solution, its problem and its name: with optimizer state in the parts of
        its parameters, or in more if it does not fit so."""
        problem = self._problem(objective, sizes)
        try:
            return problem, problem.solution(seconds), "found"
        except DoesNotFitError:
            apart = self._apart(objective, layout)
            if not apart:
                raise
        name, least = apart[-1]
        problem = self._problem(least, sizes)
        return problem, problem.solution(seconds), name

    def _apart(self, objective: Objective, layout: Layout) -> list[tuple[str, Objective]]:
        """Returns objectives with optimizer state in more parts than its parameters, and with
        gradients in these parts as well, by the names of the presets; none if mesh axes cannot cut
        them so, or the optimizer cannot update parts alone. Gradients that are summed once go
        straight to the parts that are updated."""
        axes = tuple(axis for axis in _STATE_AXES if layout.size(axis) > 1)
        if not axes or self.given is not None or not self._updates_apart or layout.stage > 1:
            return []
        moments = self.traced.moment_bytes
        both = moments + GRADIENT_BYTES
        cut = functools.partial(dataclasses.replace, objective, state_axes=axes)
        if layout.microbatches == 1:
            return [(_ZERO1, cut(apart_bytes=both, gradients_apart=True))]
        return [
            (_ZERO1, cut(apart_bytes=moments)),
            (_ZERO2, cut(apart_bytes=both, gradients_apart=True)),
        ]

    def _problem(self, objective: Objective, sizes: Mapping[str, int]) -> LayoutProblem:
        problem = LayoutProblem(self.classes, objective)
        shapes = [tensor.shape for tensor in self.classes.tensors]
        for other in self.forbidden:
            if (other.sizes, other.remat) != (sizes, self.remat):
                continue
            if [tensor.shape for tensor in other.classes.tensors] != shapes:
                raise ConfigError(
                    f"forbidden has rules of another model than {self.traced.module.name}.\n"
                    "  Give only answers for this model and batch."
                )
            problem.forbid(other.solution)
        return problem

    def _answer(
        self, name: str, problem: LayoutProblem, solution: Solution, layout: Layout, lowers: bool
    ) -> "_Answer":
        cuts = problem.state_cuts if problem.objective.state_axes else None
        axes = self.traced.module.axes
        paths, attends = self.traced.paths, self.traced.attends
        cut = solution
        if layout.stage > 1:
            cut = self.stages.with_rule(solution, self.classes)
        named = named_rules(self.classes, cut, paths, axes, cuts, attends=attends)
        if layout.microbatches > 1 and problem.objective.gradients_apart:
            rules = dataclasses.replace(named.rules, gradients=named.rules.opt_state)
            named = dataclasses.replace(named, rules=rules)
        if name == _FSDP and (names := named.rules.names):
            # The partitioner lays the activations out, as under the preset.
            names = dataclasses.replace(names, inputs=(), variants=())
            named = dataclasses.replace(named, rules=dataclasses.replace(named.rules, names=names))
        price = self._price(f"{name}, {layout}", named.rules, layout, lowers)
        workload = self._workload(named.rules, lowers)
        sent = workload.traffic(layout) if lowers else None
        if layout.stage > 1:
            sent = counted_traffic(workload, layout)
        traffic = predicted_traffic(problem, solution) if sent is None else sent
        return _Answer(name, price, named, solution, problem, traffic)

    def _otherwise(
        self, objective: Objective, layout: Layout, own: "_Answer", alone: bool
    ) -> Iterator[tuple[str, Objective]]:
        """Yields other objectives on a mesh with `tensor`: with fewer moves of parameters, and with
        whole sequences, without `tensor`, or with the rows of the batch cut over it as well. On a
        mesh with `expert`, one of them leaves all experts on every device; on one of `fsdp` alone,
        parameters lie as under that preset.

        The integer program misses some costs of a program, so that answers that it finds alike may
        differ once they are lowered. Without lowering, rows are cut where leaving `tensor` idle is
        as quick as a cut of other dims.
        """
        if self.given is not None:
            return
        lowers = self._lowers(layout, alone)
        if alone and not objective.state_axes:
            yield from self._apart(objective, layout)
        if layout.expert > 1 and lowers:
            yield "whole experts", dataclasses.replace(objective, experts=NONE)
        if lowers and layout.fsdp == layout.num_devices:
            with contextlib.suppress(RuleError):  # of parameters that it places differently
                rules = fsdp_alone(self.traced.module.axes)
                pinned = pinned_params(self.traced, self.classes, rules, layout, with_auto=True)
                yield _FSDP, dataclasses.replace(objective, pinned_params=pinned)
        if layout.tensor == 1:
            return
        if layout.stage > 1:
            yield "nested", dataclasses.replace(objective, nested_params=True)
            return
        if lowers:
            nested = dataclasses.replace(objective, nested_params=True)
            yield "nested", nested
            yield "whole sequences", dataclasses.replace(nested, params_alone=True)
            links = {a: link for a, link in objective.network.links.items() if a != "tensor"}
            yield _IDLE, dataclasses.replace(objective, network=Network(links))
        else:
            rules = fsdp_alone(self.traced.module.axes)
            idle = self._price("idle", rules, layout, lowers)
            if own.price.seconds < (1 - SURE) * idle.seconds:
                return
        rows = layout.batch_shards * layout.tensor * layout.microbatches
        if self._divides(rows):
            yield _ROWS, self._objective(layout, (*BATCH_AXES, "tensor"))

    def compared(
        self, microbatches: int, name: str, rules: AxisRules, sizes: Mapping[str, int]
    ) -> tuple[Price, dict[str, str]]:
        """Returns the price of other rules on a mesh, and how they place each parameter."""
        layout = dataclasses.replace(Layout.of(sizes), microbatches=microbatches)
        if layout.stage > 1 and (faults := self._workload(rules, lowers=False).faults(layout)):
            raise RuleError(
                f"{name} cannot be compared on {layout}: {'; '.join(faults)}.\n"
                f"  Add a rule that puts the layers on {STAGE}."
            )
        mesh = abstract_mesh(str(layout), layout.num_devices)
        placed = place(self.traced.params, self.traced.module.axes, rules, mesh)
        shown = {
            path: ", ".join("+".join(axes) or "-" for axes in from_spec(p.spec, len(p.shape)).dims)
            for path, p in placed.items()
        }
        return self._price(name, rules, layout, self._lowers(layout, alone=True)), shown

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

    def _price(self, name: str, rules: AxisRules, layout: Layout, lowers: bool) -> Price:
        workload = self._workload(rules, lowers)
        time = workload.step_time(layout, self.cluster).total
        memory = workload.peak_memory(layout, self.cluster).total
        unhidden = workload.unhidden_seconds(layout, self.cluster) if lowers else None
        return Price(name, time, memory, unhidden)

    def _workload(self, rules: AxisRules, lowers: bool) -> Any:
        """Returns the step under rules: as shardlib partitions it, or as a traced program."""
        return self._workloads(rules, lowers)

    @functools.cached_property
    def _workloads(self) -> Any:
        def under(rules: AxisRules, lowers: bool) -> TracedWorkload:
            if lowers:
                return lowered(self.workload, rules, self.cluster.platform)
            step = dataclasses.replace(self.workload.step, rules=rules)
            return dataclasses.replace(self.workload, step=step)

        return functools.lru_cache(64)(under)

    @functools.cached_property
    def _network(self) -> Callable[[Layout], Network]:
        """Returns the links of a mesh. All problems on it share the seconds of moves."""

        def links(layout: Layout) -> Network:
            links_of = by_joint_axes(layout, self.cluster, committed(), SHARDLIB)
            cut = [axis for axis in reversed(AXES) if axis != STAGE and layout.size(axis) > 1]
            return Network({axis: links_of((axis,))[0] for axis in cut})

        return functools.cache(links)

    def _objective(self, layout: Layout, cut_rows: Sequence[str] = BATCH_AXES) -> Objective:
        batch = tuple(axis for axis in cut_rows if layout.size(axis) > 1)
        pinned = dict.fromkeys(self._rows.axes, (CONTEXT,)) if layout.context > 1 else {}
        pinned |= {
            number: batch
            for number, axis in enumerate(self.classes.axes)
            if any(t.pattern.startswith(INPUT) and t.dim == 0 for t in axis.touches)
        }
        return Objective(
            network=self._network(dataclasses.replace(layout, microbatches=1)),
            rates=self._rates,
            state_bytes=self.traced.state_bytes,
            saved_scale=self._saved_scale(layout),
            capacity_bytes=self.capacity_bytes,
            reserved_bytes=RUNTIME_BYTES[self.cluster.platform] + self._kept_inputs(layout),
            param_axes=PARAM_AXES,
            batch_axes=batch,
            pinned_axes=pinned,
            pinned_params=self._pinned_params(layout),
            experts=self._experts,
            microbatches=layout.microbatches,
            params_alone=layout.stage > 1,  # A pipeline uses the rules of parameters alone.
            stages=layout.stage,
            layers=self.stages.params,
        )

    def _pinned_params(self, layout: Layout) -> dict[int, Dims]:
        """Returns the layouts of parameters that the given rules decide."""
        if self.given is None:
            return {}
        return pinned_params(self.traced, self.classes, self.given, layout)

    def _kept_inputs(self, layout: Layout) -> float:
        """Returns the bytes of inputs of its layers that a stage keeps."""
        if layout.stage == 1:
            return 0.0
        parts = layout.batch_shards * layout.microbatches
        return layout.kept_inputs * self.stages.carry_bytes / parts

    def _lowers(self, layout: Layout, alone: bool) -> bool:
        """Returns whether the program of a device is priced: in a pipeline it is not."""
        return alone and not self.traced.names and layout.stage == 1

    def _saved_scale(self, layout: Layout) -> float:
        """Returns the part of the activations that is held at the peak: what the traced step holds
        with the batch cut alone, over the operands of its products. A stage holds the activations
        of its own layers."""
        counted = sum(tensor.saved_bytes for tensor in self.classes.tensors) / layout.batch_shards
        fsdp = layout.fsdp * layout.expert
        alone = dataclasses.replace(layout, stage=1, fsdp=fsdp, expert=1, context=1, tensor=1)
        return self._held_activations(alone) / counted / layout.stage if counted else 0.0

    @functools.cached_property
    def _held_activations(self) -> Callable[[Layout], float]:
        """Returns the bytes that a device holds at the peak besides state. Many meshes share those
        of the mesh that cuts the batch alone."""

        def held(layout: Layout) -> float:
            memory = self.workload.peak_memory(layout, self.cluster)
            return (
                memory.total - memory.params - memory.gradients - memory.optimizer - memory.runtime
            )

        return functools.cache(held)


class _Answer(NamedTuple):
    """Rules for one mesh."""

    name: str
    price: Price
    named: NamedAxes
    solution: Solution
    problem: LayoutProblem
    traffic: Traffic


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
