"""The choice of layouts as an integer program.

Variables: for each tensor class one per layout, of which exactly one is 1; for each operation class
one per way to cut its factors; for each operand and result the moves between the two. A move's
marginals are the layout of the tensor and that of the operation, so that the moves are continuous.

    minimize    seconds of products + moves + passes over memory + updates + rules
    such that   state and saved activations fit into a device

Source of the formulation: Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator
Parallelism for Distributed Deep Learning", section 4; here classes repeat, and moves are a flow.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from typing import get_args

from shardlib.cost.machine.rates import Rates
from shardlib.errors import PartitionError, ShardlibError
from shardlib.find.attention_choices import AttentionChoices
from shardlib.find.axes import SLICE
from shardlib.find.context import CONTEXT, exchange_seconds
from shardlib.find.edge_moves import EdgeMoves
from shardlib.find.equivalence import Classes, Edge, OperationClass, TensorClass
from shardlib.find.experts import EXPERT, NONE, FoundExperts
from shardlib.find.moves import Network
from shardlib.find.named_choices import NamedChoices
from shardlib.find.opt_state import StateCuts
from shardlib.find.program import IntegerProgram, Part
from shardlib.find.refusals import does_not_fit
from shardlib.partitioner.attention import LENGTH
from shardlib.partitioner.factors import Assignment, dims_of
from shardlib.partitioner.layout import Dims

_PASSES = 3.0
"""Passes over an activation for each of the forward pass: one forward, and a read of the value and
one of its gradient backward."""
_PRODUCTS = 3.0
"""Products for each of the forward pass: backward there is one for each operand."""
_UPDATE_PASSES = 7 * 4
"""Bytes of an element that an update reads and writes: gradient, two moments and the parameter are
read, and all but the gradient written, in float32 (Loshchilov and Hutter 2019, algorithm 2)."""
_RULE_SHARE = 0.002
"""Cost of a rule, as a share of the least time of a step: near ties go to the shorter table."""
_MOST_ALIKE = 0.75
"""Part of the layouts that a solution may share with a forbidden one."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The costs of a step, and the memory that it has."""

    network: Network
    rates: Rates
    state_bytes: float
    """Bytes of state for an element of a parameter."""
    saved_scale: float
    """Part of the activations that is saved; smaller with rematerialisation or microbatches."""
    capacity_bytes: float
    param_axes: frozenset[str]
    """Mesh axes that may cut any dim of parameters."""
    batch_axes: tuple[str, ...]
    """Mesh axes that cut the batch, over which parameters are gathered where they are used."""
    pinned_axes: Mapping[int, tuple[str, ...]]
    """Mesh axes of discovered axes in activations."""
    pinned_params: Mapping[int, Dims]
    """Layouts of tensor classes that the user has decided."""
    experts: FoundExperts = NONE
    """Experts that the mesh axis `expert` may cut."""
    microbatches: int = 1
    """Parts of a batch, for each of which parameters are gathered and gradients summed."""
    reserved_bytes: float = 0.0
    """Memory of a device that is not for state and activations."""
    nested_params: bool = False
    """Whether a move of a parameter only adds or removes mesh axes, as in rules written by hand."""
    state_axes: tuple[str, ...] = ()
    """Mesh axes that cut the optimizer state also where they cut no parameter."""
    apart_bytes: float = 0.0
    """Bytes of `state_bytes` that they cut."""
    gradients_apart: bool = False
    """Whether gradients are summed straight into the parts of the optimizer state."""
    params_alone: bool = False
    """Whether only axes of parameters are cut, besides the pinned ones: sequences stay whole."""
    stages: int = 1
    """Stages of a pipeline, each of which holds and runs a part of the layers on this mesh."""
    layers: Set[int] = frozenset()
    """The tensor classes of the parameters of these layers."""

    @property
    def share(self) -> float:
        """Time of a step over that of all stages one after the other. The others are idle while the
        first microbatches reach them (Huang et al. 2019, "GPipe", section 2.3)."""
        return (1 + (self.stages - 1) / self.microbatches) / self.stages


@dataclasses.dataclass(frozen=True)
class Solution:
    """The layouts of all classes."""

    layouts: Mapping[int, Dims]
    """By tensor class."""
    cuts: tuple[Assignment, ...]
    """By operation class."""
    rules: Mapping[str, tuple[str, ...]]
    """The mesh axes of each name by which the model places tensors, as in `Tensor.names`, in the
    order in which they take mesh axes."""
    seconds: float
    """The objective."""
    seconds_by_part: Mapping[Part, float]
    bound_seconds: float
    """No choice is quicker."""
    memory_bytes: float
    """Of one device."""
    num_variables: int

    @property
    def gap(self) -> float:
        """How far the solution is from the bound at most."""
        return max(self.seconds - self.bound_seconds, 0.0) / max(self.seconds, 1e-12)


class LayoutProblem(IntegerProgram):
    """The integer program of a traced loss on a mesh."""

    def __init__(self, classes: Classes, objective: Objective):
        super().__init__()
        self.classes, self.objective = classes, objective
        self.network, self.rates = objective.network, objective.rates
        self.memory: list[tuple[int, float]] = []
        self._orders: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.layout_variables: dict[int, dict[Dims, int]] = {}
        self._cut_variables: list[dict[tuple[Dims, ...], tuple[int, Assignment]]] = []
        self.state_cuts = StateCuts(classes, objective.state_axes, self.network.sizes)
        self.rule_seconds = _RULE_SHARE * self._least_seconds()
        axes = self.network.axes
        subsets = (c for n in range(len(axes) + 1) for c in itertools.combinations(axes, n))
        cuts = [self._ordered(subset) for subset in subsets]
        self.named = NamedChoices(
            self,
            classes,
            self.network.sizes,
            cuts,
            objective.param_axes,
            objective.experts,
            self.rule_seconds,
        )
        self.edge_moves = EdgeMoves(
            classes,
            self.network,
            self.rates,
            self.state_cuts if objective.gradients_apart else None,
            nested_params=bool(self.named.names) or objective.nested_params,
            gathers=1 + classes.recomputes + (objective.stages > 1),
        )
        self.attention = AttentionChoices(
            self, classes, self.network, objective.batch_axes, self.named.columns, cuts
        )
        for number in self._live():
            self._add_tensor(number, classes.tensors[number])
        self._add_rules()
        for operation in classes.operations:
            self._add_operation(operation)
        if math.isfinite(objective.capacity_bytes):
            left = objective.capacity_bytes - objective.reserved_bytes
            self.row(self.memory, -math.inf, left)

    def variable(self, cost: float, part: Part, *, whole: bool = False) -> int:
        """Adds a variable with a cost in seconds of all stages, and returns its column."""
        return super().variable(cost * self.objective.share, part, whole=whole)

    def forbid(self, other: Solution) -> None:
        """Forbids solutions that share more than three quarters of another's free layouts."""
        free = [
            options.get(other.layouts[number])
            for number, options in self.layout_variables.items()
            if len(options) > 1
        ]
        same = [(col, 1.0) for col in free if col is not None]
        self.row(same, -math.inf, _MOST_ALIKE * len(free))

    def solution(
        self,
        seconds: float,
        rules: Mapping[str, tuple[str, ...]] = {},
        without: Collection[int] = (),
    ) -> Solution:
        """Returns the best layouts. `rules` are decided, as in `Solution.rules`; `without` are
        columns that are not allowed.

        Raises:
            DoesNotFitError: If nothing fits into a device.
            PartitionError: If no answer was found in time.
        """
        decided = [self.named.columns[name][cut] for name, cut in rules.items()]
        answer = self.solve(seconds, decided, without)
        if answer.values is None:
            raise self._infeasible(answer.out_of_time)
        x = answer.values
        layouts = {
            number: max(options, key=lambda dims: x[options[dims]])
            for number, options in self.layout_variables.items()
        }
        cuts = tuple(
            max(options.values(), key=lambda pair: x[pair[0]])[1] for options in self._cut_variables
        )
        memory = float(sum(x[col] * value for col, value in self.memory))
        spent = dict.fromkeys(get_args(Part), 0.0)
        for value, cost, part in zip(x, self.costs, self.parts, strict=True):
            spent[part] += float(value * cost)
        rules, bound = self.named.rules(x), answer.bound_seconds
        variables = len(self.costs)
        return Solution(layouts, cuts, rules, answer.seconds, spent, bound, memory, variables)

    def _infeasible(self, out_of_time: bool) -> ShardlibError:
        if out_of_time:
            return PartitionError(
                "no layout was found in time.\n  Allow more seconds, or give a mesh of fewer axes."
            )
        held = dict(self.memory)
        least = sum(
            min(held.get(column, 0.0) for column in layouts.values())
            for layouts in self.layout_variables.values()
        )
        return does_not_fit(least + self.objective.reserved_bytes, self.objective.capacity_bytes)

    def _live(self) -> list[int]:
        """Returns the tensor classes that are stored or that an operation reads or writes."""
        used = {number for number, tensor in enumerate(self.classes.tensors) if tensor.copies}
        for operation in self.classes.operations:
            used.update(edge.tensor for edge in operation.edges)
        return sorted(used)

    def _add_tensor(self, number: int, tensor: TensorClass) -> None:
        options = {}
        for dims in self._layouts(number):
            parts = self.network.degree(axis for axes in dims for axis in axes)
            cost = _PASSES * tensor.pass_bytes / parts / self.rates.memory
            held = self.objective.saved_scale * tensor.saved_bytes / parts
            if tensor.copies:
                state = tensor.copies * tensor.bytes / parts
                if tensor.trained:
                    seconds, num_bytes = self._of_state(tensor, dims, parts)
                    cost, state = cost + seconds, state + num_bytes
                held += state / (self.objective.stages if number in self.objective.layers else 1)
            options[dims] = self.variable(cost, "passes", whole=True)
            if held:
                self.memory.append((options[dims], held))
        self.layout_variables[number] = options
        self.row([(col, 1.0) for col in options.values()], 1, 1)
        self.named.tie(tensor.names, tensor.shape, options.items())

    def _of_state(self, tensor: TensorClass, dims: Dims, parts: int) -> tuple[float, float]:
        """Returns the seconds to update parameters in `parts` and to gather them after it, and the
        bytes of a device for their gradients and optimizer state."""
        elements, objective = tensor.elements * tensor.copies / parts, self.objective
        cuts = self.state_cuts.further(tensor, dims).values()
        further = frozenset(axis for cut in cuts for axis in cut)
        pieces = self.network.degree(further)
        seconds = _UPDATE_PASSES * elements / pieces / self.rates.memory
        gathered = self.network.collective("all_gather", further, tensor.bytes / parts)
        each = objective.state_bytes - tensor.width
        num_bytes = each - objective.apart_bytes * (1 - 1 / pieces)
        return seconds + tensor.copies * gathered, num_bytes * elements

    def _layouts(self, number: int) -> list[Dims]:
        """Returns the possible layouts of a tensor class."""
        tensor, objective = self.classes.tensors[number], self.objective
        if number in objective.pinned_params:
            return [objective.pinned_params[number]]
        rank = len(tensor.shape)
        is_param = tensor.kind == "param"
        if is_param and not tensor.names and tensor.is_small:
            return [((),) * rank]
        axes = [a for a in self.network.axes if not is_param or a in objective.param_axes]
        axes += [EXPERT] if is_param and EXPERT in self.network.axes else []
        pins = {} if is_param else self._pins(tensor)
        places_of = [(None, *self._dims_for(axis, number)) for axis in axes]
        found = []
        for places in itertools.product(*places_of):
            dims = tuple(
                self._ordered(tuple(a for a, at in zip(axes, places, strict=True) if at == dim))
                for dim in range(rank)
            )
            pinned = all(self._meets(dims, dim, pin) for dim, pin in pins.items())
            unnamed = (dims[dim] for dim, name in enumerate(tensor.names) if name is None)
            if pinned and not any(unnamed) and self._divides(tensor, dims, pins):
                found.append(dims)
        return found

    def _dims_for(self, axis: str, number: int) -> Sequence[int]:
        """Returns the dims of a tensor class that a mesh axis may cut: `EXPERT` cuts experts, and
        the rows of activations; `CONTEXT` their positions."""
        tensor, experts = self.classes.tensors[number], self.objective.experts
        every = range(len(tensor.shape))
        if axis == CONTEXT:
            return [dim for dim in every if self._is_position(tensor.axes[dim])]
        if axis != EXPERT:
            return every
        if tensor.kind != "param":
            return [dim for dim in every if self._takes_experts(tensor.axes[dim])]
        named = [dim for dim, name in enumerate(tensor.names) if name in experts.names]
        return named or [dim for dim in every if experts.dims.get(number) == dim]

    def _takes_experts(self, axis: int) -> bool:
        """Returns whether `EXPERT` may cut a discovered axis in activations."""
        objective = self.objective
        return axis in objective.experts.axes or EXPERT in objective.pinned_axes.get(axis, ())

    def _meets(self, dims: Dims, dim: int, pin: tuple[str, ...]) -> bool:
        """Returns whether a dim is cut as decided: `EXPERT` may cut experts in place of rows, and
        other axes the positions of a device further."""
        if dims[dim] == pin or dims[dim][:1] == pin == (CONTEXT,):
            return True
        elsewhere = EXPERT in pin and any(EXPERT in axes for axes in dims)
        return elsewhere and dims[dim] == tuple(axis for axis in pin if axis != EXPERT)

    def _pins(self, tensor: TensorClass) -> dict[int, tuple[str, ...]]:
        """Returns the mesh axes of dims that are decided: of rows that meet in a tensor, as in
        scores of all pairs, the first dim. Dims that the model constrains to be whole stay free."""
        pins: dict[int, tuple[str, ...]] = {}
        names = tensor.names or ("",) * len(tensor.shape)
        for dim, (axis, size, name) in enumerate(
            zip(tensor.axes, tensor.shape, names, strict=True)
        ):
            pin = self.objective.pinned_axes.get(axis)
            if pin is None or name is None or size % self.network.degree(pin):
                continue
            if not any(set(pin) & set(other) for other in pins.values()):
                pins[dim] = pin
        return pins

    def _ordered(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns axes in the order in which they cut the batch, if exactly these or the major ones
        of them do; otherwise with `CONTEXT` first."""
        if axes not in self._orders:
            firsts = (pin[: len(axes)] for pin in self.objective.pinned_axes.values())
            positions = tuple(sorted(axes, key=lambda axis: axis != CONTEXT))
            self._orders[axes] = next((one for one in firsts if set(one) == set(axes)), positions)
        return self._orders[axes]

    def _divides(self, tensor: TensorClass, dims: Dims, pins: Mapping[int, tuple]) -> bool:
        """Returns whether a layout cuts evenly, and no stack of layers: a loop takes one of them
        after the other."""
        for dim, (axes, axis) in enumerate(zip(dims, tensor.axes, strict=True)):
            found = self.classes.axes[axis]
            keeps = self.objective.params_alone and not found.is_of_params
            # Operations cut whole groups or heads of an axis; parameters are gathered before.
            groups = 0 if tensor.kind == "param" else found.size
            whole = 1 if found.is_layers or keeps else math.gcd(tensor.shape[dim], groups)
            is_pinned = dim in pins and len(axes) <= len(pins[dim])
            if not is_pinned and whole % self.network.degree(axes):
                return False
        return True

    def _add_rules(self) -> None:
        """Adds the cost of each rule that a table needs: an axis with a mesh axis that cuts it."""
        rules: dict[tuple[str, int, str], int] = {}
        for number, options in self.layout_variables.items():
            tensor = self.classes.tensors[number]
            if tensor.names or (self.named.names and tensor.kind != "param"):
                continue
            for dim, axis in enumerate(tensor.axes):
                if tensor.kind != "param" and axis in self.objective.pinned_axes:
                    continue
                for name in self.network.axes:
                    having = [col for dims, col in options.items() if name in dims[dim]]
                    if not having:
                        continue
                    key = tensor.kind, axis, name
                    if key not in rules:
                        rules[key] = self.variable(self.rule_seconds, "rules")
                    self.row([*((col, 1.0) for col in having), (rules[key], -1.0)], -math.inf, 0)

    def _least_seconds(self) -> float:
        """Returns a measure of a step: products on all devices, one gather of all parameters."""
        held = sum(tensor.bytes * tensor.copies for tensor in self.classes.tensors)
        speeds = (link.bytes_per_second for link in self.network.links.values())
        return self.product_seconds + held / max(speeds, default=math.inf)

    @property
    def product_seconds(self) -> float:
        """Seconds of the products on all devices."""
        flops = sum(op.factors.flops * op.times for op in self.classes.operations if op.multiplies)
        return self._products * flops / self.network.degree(self.network.axes) / self.rates.flops

    @property
    def _products(self) -> float:
        """Products for each of the forward pass: a stage runs that of its layers again."""
        return _PRODUCTS + (self.objective.stages > 1)

    def _add_operation(self, operation: OperationClass) -> None:
        """Adds the ways to cut an operation, and the moves of its operands and its result."""
        edges = operation.edges
        variables: dict[tuple[Dims, ...], tuple[int, Assignment]] = {}
        for cut in self.cuts(operation):
            state = tuple(dims_of(edge.dims, cut) for edge in edges)
            if state not in variables:
                variables[state] = (
                    self.variable(self.work_seconds(operation, cut), "products"),
                    cut,
                )
        self._cut_variables.append(variables)
        self.row([(col, 1.0) for col, _ in variables.values()], 1, 1)
        self._tie_reads(operation, variables)
        if operation.attention is not None:
            self.attention.tie(operation, ((cut, col) for col, cut in variables.values()))
        for position, edge in enumerate(edges):
            by_pieces: dict[tuple[Dims, frozenset[str]], list[int]] = collections.defaultdict(list)
            is_result = position >= len(operation.operands)
            for state, (col, cut) in variables.items():
                pending = self.pending(operation, cut, edge, is_result=is_result)
                by_pieces[state[position], pending].append(col)
            self._add_moves(operation, edge, is_result, by_pieces)

    def _tie_reads(
        self,
        operation: OperationClass,
        variables: Mapping[tuple[Dims, ...], tuple[int, Assignment]],
    ) -> None:
        """Lets an operation read a parameter as the model places it there by name. What it cannot
        cut is free."""
        for position, edge in enumerate(operation.operands):
            if not edge.read_as or operation.name == SLICE:
                continue
            names = tuple(
                None if factor is None else name
                for name, factor in zip(edge.read_as, edge.dims, strict=True)
            )
            columns = [(state[position], col) for state, (col, _) in variables.items()]
            self.named.tie(names, self.classes.tensors[edge.tensor].shape, columns)

    def cuts(self, operation: OperationClass) -> Iterator[Assignment]:
        """Yields the assignments of mesh axes to the factors of an operation."""
        factors = operation.factors
        seen = {f for edge in operation.edges for f in edge.dims}
        options = sorted(f for f in seen if f is not None)
        axes = self.network.axes
        places_of = {EXPERT: self._factors_of(operation, self._takes_experts)}
        places_of[CONTEXT] = self._factors_of(operation, self._is_position)
        if LENGTH in options and operation.attention is not None:
            options.remove(LENGTH)  # Only `CONTEXT` cuts it.
        for places in itertools.product(*((None, *places_of.get(a, options)) for a in axes)):
            cut: Assignment = {}
            for axis, factor in zip(axes, places, strict=True):
                if factor is not None:
                    cut[factor] = (*cut.get(factor, ()), axis)
            cut = {factor: self._ordered(names) for factor, names in cut.items()}
            whole = (factors.sizes[f] % self.network.degree(names) for f, names in cut.items())
            runs = operation.attention is None or self.attention.runs(operation, cut)
            if not any(whole) and runs and not self._keeps_params_cut(operation, cut):
                yield cut

    def _factors_of(self, operation: OperationClass, takes: Callable[[int], bool]) -> list[int]:
        """Returns the factors of an operation with a discovered axis that `takes` accepts."""
        factors = set[int]()
        for edge in operation.edges:
            pairs = zip(edge.dims, self.classes.tensors[edge.tensor].axes, strict=True)
            factors |= {f for f, axis in pairs if f is not None and takes(axis)}
        return sorted(factors)

    def _is_position(self, axis: int) -> bool:
        """Returns whether `CONTEXT` cuts a discovered axis in activations."""
        return CONTEXT in self.objective.pinned_axes.get(axis, ())

    def _keeps_params_cut(self, operation: OperationClass, cut: Assignment) -> bool:
        """Returns whether a parameter would stay cut by the axes of the batch while activations
        are made of it: the partitioner gathers it (`analyze.LayoutWalk.used`), except for the
        experts of a product."""
        kinds = self.classes.tensors
        if kinds[operation.results[0].tensor].kind == "param":
            return False
        used = (e for e in operation.operands if kinds[e.tensor].kind == "param")
        factors = {f for edge in used for f in edge.dims if f is not None}
        apart = operation.factors.shared if operation.multiplies else ()
        axes = {a for f in factors for a in cut.get(f, ()) if a != EXPERT or f not in apart}
        return not axes.isdisjoint(self.objective.batch_axes)

    def work_seconds(self, operation: OperationClass, cut: Assignment) -> float:
        if not operation.multiplies:
            return 0.0
        parts = self.network.degree(axis for axes in cut.values() for axis in axes)
        flops = self._products * operation.factors.flops * operation.times
        seconds = flops / parts / self.rates.flops
        attention = operation.attention
        if attention is None:
            return seconds
        sent = exchange_seconds(self.classes, operation, cut, self.network) * operation.times
        if attention.method == "ring":
            # Devices compute with the keys that they have while others arrive.
            return max(seconds, sent)
        return seconds + (1 - self.rates.hide_tensor) * sent

    def pending(
        self, operation: OperationClass, cut: Assignment, edge: Edge, *, is_result: bool
    ) -> frozenset[str]:
        """Returns the axes over which a result, or the gradient of an operand, is a sum.

        The gradient of an operand is a sum over the factors of the result that it lacks.
        """
        if is_result:
            lacking = set(operation.factors.reduced)
        else:
            lacking = {f for result in operation.results for f in result.dims if f is not None}
        return frozenset(axis for f in lacking.difference(edge.dims) for axis in cut.get(f, ()))

    def _add_moves(
        self,
        operation: OperationClass,
        edge: Edge,
        is_result: bool,
        by_pieces: Mapping[tuple[Dims, frozenset[str]], Sequence[int]],
    ) -> None:
        """Adds the moves between the layouts of a tensor and those in an operation."""
        options = self.layout_variables[edge.tensor]
        is_param = self.classes.tensors[edge.tensor].kind == "param"
        part: Part = "parameters" if is_param else "activations"
        times = operation.times * edge.share * (self.objective.microbatches if is_param else 1)
        by_layout: dict[Dims, list[int]] = {dims: [] for dims in options}
        of_pieces = self.edge_moves.into(edge, is_result, tuple(options), tuple(by_pieces))
        for moves, columns in zip(of_pieces, by_pieces.values(), strict=True):
            made = []
            for dims, seconds in moves:
                col = self.variable(seconds * times, part)
                made.append(col)
                by_layout[dims].append(col)
            self.row([*((col, 1.0) for col in made), *((col, -1.0) for col in columns)], 0, 0)
        for dims, columns in by_layout.items():
            self.row([*((col, 1.0) for col in columns), (options[dims], -1.0)], 0, 0)
