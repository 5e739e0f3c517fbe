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
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from shardlib.cost.machine.rates import Rates
from shardlib.errors import DoesNotFitError, PartitionError, ShardlibError
from shardlib.find.classes import Classes, Edge, OperationClass, TensorClass
from shardlib.find.moves import Network, is_nested, keeps_blocks, num_changes
from shardlib.partitioner.factors import Assignment, dims_of
from shardlib.partitioner.layout import Dims

MIN_ELEMENTS = 2**14
"""Parameters with fewer elements are replicated, as `rules.Auto` does."""
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
_MAX_CHANGES = {"param": 2, "activation": 1}
"""Mesh axes that a move may change. More only add steps between two layouts."""
_GAP = 1e-3
_MOST_ALIKE = 0.75
"""Part of the layouts that a solution may share with a forbidden one."""
Part = Literal["products", "parameters", "activations", "passes", "rules"]
"""The kind of a cost: products, moves of parameters or of activations, passes over memory, or rules
in the table."""

Move = tuple[int, tuple[Dims, Dims, frozenset[str]]]
"""How often a move happens, its two layouts, and the axes along which a sum is pending."""


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
    """Mesh axes that may cut parameters."""
    batch_axes: frozenset[str]
    """Mesh axes over which parameters are gathered where they are used."""
    pinned_axes: Mapping[int, tuple[str, ...]]
    """Mesh axes of discovered axes in activations."""
    pinned_params: Mapping[int, Dims]
    """Layouts of tensor classes that the user has decided."""
    microbatches: int = 1
    """Parts of a batch, for each of which parameters are gathered and gradients summed."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """The layouts of all classes."""

    layouts: Mapping[int, Dims]
    """By tensor class."""
    cuts: tuple[Assignment, ...]
    """By operation class."""
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


class LayoutProblem:
    """The integer program of a traced loss on a mesh."""

    def __init__(self, classes: Classes, objective: Objective):
        self.classes, self.objective = classes, objective
        self.network, self.rates = objective.network, objective.rates
        self.costs: list[float] = []
        self._parts: list[Part] = []
        self._whole: list[bool] = []
        self._rows: list[tuple[list[tuple[int, float]], float, float]] = []
        self.memory: list[tuple[int, float]] = []
        self.layout_variables: dict[int, dict[Dims, int]] = {}
        self._cut_variables: list[dict[tuple[Dims, ...], tuple[int, Assignment]]] = []
        for number in self._live():
            self._add_tensor(number, classes.tensors[number])
        self._add_rules()
        for operation in classes.operations:
            self._add_operation(operation)

    def forbid(self, other: Solution) -> None:
        """Forbids solutions that share more than three quarters of another's free layouts."""
        free = [
            options[other.layouts[number]]
            for number, options in self.layout_variables.items()
            if len(options) > 1
        ]
        self._row([(col, 1.0) for col in free], -math.inf, _MOST_ALIKE * len(free))

    def solve(self, seconds: float) -> Solution:
        """Returns the best layouts.

        Args:
            seconds: The time limit.

        Raises:
            DoesNotFitError: If nothing fits into a device.
            PartitionError: If no answer was found in time.
        """
        rows = list(self._rows)
        if math.isfinite(self.objective.capacity_bytes):
            rows.append((self.memory, -math.inf, self.objective.capacity_bytes))
        entries = [(i, col, value) for i, (terms, *_) in enumerate(rows) for col, value in terms]
        at, cols, values = (np.array(part) for part in zip(*entries, strict=True))
        matrix = csr_matrix((values, (at, cols)), shape=(len(rows), len(self.costs)))
        lower, upper = (np.array([row[i] for row in rows]) for i in (1, 2))
        # HiGHS works with absolute tolerances near 1e-6: scale the largest cost to about 1e3.
        scale = 1e3 / max(max(self.costs), 1e-12)
        found = milp(
            np.array(self.costs) * scale,
            integrality=np.array(self._whole, int),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, lower, upper),  # type: ignore[arg-type]
            options={"time_limit": seconds, "mip_rel_gap": _GAP},
        )
        if found.x is None:
            raise self._infeasible(found.status)
        return self._read(found.x, found.fun / scale, found.mip_dual_bound / scale)

    def _infeasible(self, status: int) -> ShardlibError:
        if status == 1:
            return PartitionError(
                "no layout was found in time.\n  Allow more seconds, or give a mesh of fewer axes."
            )
        held = dict(self.memory)
        least = sum(
            min(held.get(column, 0.0) for column in layouts.values())
            for layouts in self.layout_variables.values()
        )
        have = self.objective.capacity_bytes
        return DoesNotFitError(
            f"no layout fits: a device needs at least {least / 2**30:.1f} GiB and has "
            f"{have / 2**30:.1f} GiB.\n"
            "  Use more devices, microbatches or rematerialisation, or cut the batch.",
            int(least),
        )

    def _read(self, x: np.ndarray, seconds: float, bound: float) -> Solution:
        layouts = {
            number: max(options, key=lambda dims: x[options[dims]])
            for number, options in self.layout_variables.items()
        }
        cuts = tuple(
            max(options.values(), key=lambda pair: x[pair[0]])[1] for options in self._cut_variables
        )
        memory = sum(x[col] * value for col, value in self.memory)
        spent = dict.fromkeys(get_args(Part), 0.0)
        for value, cost, part in zip(x, self.costs, self._parts, strict=True):
            spent[part] += value * cost
        return Solution(layouts, cuts, seconds, spent, bound, memory, len(self.costs))

    def _variable(self, cost: float, part: Part, *, whole: bool = False) -> int:
        self.costs.append(cost)
        self._parts.append(part)
        self._whole.append(whole)
        return len(self.costs) - 1

    def _row(self, terms: list[tuple[int, float]], lower: float, upper: float) -> None:
        self._rows.append((terms, lower, upper))

    def _live(self) -> list[int]:
        """Returns the tensor classes that are stored or that an operation reads or writes."""
        used = {number for number, tensor in enumerate(self.classes.tensors) if tensor.copies}
        for operation in self.classes.operations:
            used.update(edge.tensor for edge in (*operation.operands, operation.result))
        return sorted(used)

    def _add_tensor(self, number: int, tensor: TensorClass) -> None:
        options = {}
        for dims in self._layouts(number):
            parts = self.network.degree(axis for axes in dims for axis in axes)
            cost = _PASSES * tensor.pass_bytes / parts / self.rates.memory
            held = self.objective.saved_scale * tensor.saved_bytes / parts
            if tensor.copies:
                elements = tensor.elements * tensor.copies / parts
                cost += _UPDATE_PASSES * elements / self.rates.memory
                held += self.objective.state_bytes * elements
            options[dims] = self._variable(cost, "passes", whole=True)
            if held:
                self.memory.append((options[dims], held))
        self.layout_variables[number] = options
        self._row([(col, 1.0) for col in options.values()], 1, 1)

    def _layouts(self, number: int) -> list[Dims]:
        """Returns the possible layouts of a tensor class."""
        tensor, objective = self.classes.tensors[number], self.objective
        if number in objective.pinned_params:
            return [objective.pinned_params[number]]
        rank = len(tensor.shape)
        is_param = tensor.kind == "param"
        if is_param and tensor.elements < MIN_ELEMENTS:
            return [((),) * rank]
        axes = [a for a in self.network.axes if not is_param or a in objective.param_axes]
        pins = {} if is_param else self._pins(tensor)
        found = []
        for places in itertools.product((None, *range(rank)), repeat=len(axes)):
            dims = tuple(
                self._ordered(tuple(a for a, at in zip(axes, places, strict=True) if at == dim))
                for dim in range(rank)
            )
            pinned = all(dims[dim] == pin for dim, pin in pins.items())
            if pinned and self._divides(tensor, dims, pins):
                found.append(dims)
        return found

    def _pins(self, tensor: TensorClass) -> dict[int, tuple[str, ...]]:
        """Returns the mesh axes of dims that are decided: of an axis that a tensor has twice, as
        scores of all pairs of rows, the first dim."""
        pins = {}
        for axis, pin in self.objective.pinned_axes.items():
            dim = tensor.axes.index(axis) if axis in tensor.axes else None
            if dim is not None and tensor.shape[dim] % self.network.degree(pin) == 0:
                pins[dim] = pin
        return pins

    def _ordered(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns axes in the order in which they cut the batch, if exactly these do."""
        pins = self.objective.pinned_axes.values()
        return next((pin for pin in pins if set(pin) == set(axes)), axes)

    def _divides(self, tensor: TensorClass, dims: Dims, pins: Container[int]) -> bool:
        for dim, (axes, axis) in enumerate(zip(dims, tensor.axes, strict=True)):
            whole = math.gcd(tensor.shape[dim], self.classes.axes[axis].size)
            if dim not in pins and whole % self.network.degree(axes):
                return False
        return True

    def _add_rules(self) -> None:
        """Adds the cost of each rule that a table needs: an axis with a mesh axis that cuts it."""
        self.rule_seconds = _RULE_SHARE * self._least_seconds()
        rules: dict[tuple[str, int, str], int] = {}
        for number, options in self.layout_variables.items():
            tensor = self.classes.tensors[number]
            for dim, axis in enumerate(tensor.axes):
                if tensor.kind != "param" and axis in self.objective.pinned_axes:
                    continue
                for name in self.network.axes:
                    having = [col for dims, col in options.items() if name in dims[dim]]
                    if not having:
                        continue
                    key = tensor.kind, axis, name
                    if key not in rules:
                        rules[key] = self._variable(self.rule_seconds, "rules")
                    self._row([*((col, 1.0) for col in having), (rules[key], -1.0)], -math.inf, 0)

    def _least_seconds(self) -> float:
        """Returns a measure of a step: products on all devices, one gather of all parameters."""
        flops = sum(op.factors.flops * op.times for op in self.classes.operations if op.multiplies)
        devices = self.network.degree(self.network.axes)
        held = sum(tensor.bytes * tensor.copies for tensor in self.classes.tensors)
        links = self.network.links.values()
        fastest = max((link.bytes_per_second for link in links), default=math.inf)
        return _PRODUCTS * flops / devices / self.rates.flops + held / fastest

    def _add_operation(self, operation: OperationClass) -> None:
        """Adds the ways to cut an operation, and the moves of its operands and its result."""
        edges = (*operation.operands, operation.result)
        variables: dict[tuple[Dims, ...], tuple[int, Assignment]] = {}
        for cut in self.cuts(operation):
            state = tuple(dims_of(edge.dims, cut) for edge in edges)
            if state not in variables:
                variables[state] = (
                    self._variable(self.work_seconds(operation, cut), "products"),
                    cut,
                )
        self._cut_variables.append(variables)
        self._row([(col, 1.0) for col, _ in variables.values()], 1, 1)
        for position, edge in enumerate(edges):
            by_pieces: dict[tuple[Dims, frozenset[str]], list[int]] = collections.defaultdict(list)
            for state, (col, cut) in variables.items():
                is_result = position == len(edges) - 1
                pending = self.pending(operation, cut, edge, is_result=is_result)
                by_pieces[state[position], pending].append(col)
            self._add_moves(operation, edge, position == len(edges) - 1, by_pieces)

    def cuts(self, operation: OperationClass) -> Iterator[Assignment]:
        """Yields the assignments of mesh axes to the factors of an operation."""
        factors = operation.factors
        seen = {f for edge in (*operation.operands, operation.result) for f in edge.dims}
        options = sorted(f for f in seen if f is not None)
        axes = self.network.axes
        for places in itertools.product((None, *options), repeat=len(axes)):
            cut: Assignment = {}
            for axis, factor in zip(axes, places, strict=True):
                if factor is not None:
                    cut[factor] = (*cut.get(factor, ()), axis)
            cut = {factor: self._ordered(names) for factor, names in cut.items()}
            whole = (factors.sizes[f] % self.network.degree(names) for f, names in cut.items())
            if not any(whole) and not self._keeps_params_cut(operation, cut):
                yield cut

    def _keeps_params_cut(self, operation: OperationClass, cut: Assignment) -> bool:
        """Returns whether a parameter would stay cut by the axes of the batch while activations
        are made of it: the partitioner gathers it (`analyze.LayoutWalk.used`)."""
        kinds = self.classes.tensors
        if kinds[operation.result.tensor].kind == "param":
            return False
        used = (e for e in operation.operands if kinds[e.tensor].kind == "param")
        axes = {axis for edge in used for names in dims_of(edge.dims, cut) for axis in names}
        return bool(axes & self.objective.batch_axes)

    def work_seconds(self, operation: OperationClass, cut: Assignment) -> float:
        if not operation.multiplies:
            return 0.0
        parts = self.network.degree(axis for axes in cut.values() for axis in axes)
        flops = _PRODUCTS * operation.factors.flops * operation.times
        return flops / parts / self.rates.flops

    def pending(
        self, operation: OperationClass, cut: Assignment, edge: Edge, *, is_result: bool
    ) -> frozenset[str]:
        """Returns the axes over which a result, or the gradient of an operand, is a sum.

        The gradient of an operand is a sum over the factors of the result that it lacks.
        """
        factors = operation.factors
        if is_result:
            summed = set(range(len(factors.sizes))).difference(edge.dims)
            return frozenset(axis for f in summed for axis in cut.get(f, ()))
        lacking = {f for f in operation.result.dims if f is not None and f not in edge.dims}
        return frozenset(axis for f in lacking for axis in cut.get(f, ()))

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
        by_layout: dict[Dims, list[int]] = {dims: [] for dims in options}
        for (pieces, pending), columns in by_pieces.items():
            moves = []
            for dims in options:
                if not is_sensible(dims, pieces, pending, is_param):
                    continue
                seconds = self.move_seconds(operation, edge, is_result, dims, pieces, pending)
                share = 1.0 if is_result else edge.share
                part: Part = "parameters" if is_param else "activations"
                col = self._variable(seconds * operation.times * share, part)
                moves.append(col)
                by_layout[dims].append(col)
            terms = [*((col, 1.0) for col in moves), *((col, -1.0) for col in columns)]
            self._row(terms, 0, 0)
        for dims, columns in by_layout.items():
            self._row([*((col, 1.0) for col in columns), (options[dims], -1.0)], 0, 0)

    def move_seconds(
        self,
        operation: OperationClass,
        edge: Edge,
        is_result: bool,
        dims: Dims,
        pieces: Dims,
        pending: frozenset[str],
    ) -> float:
        """Returns the exposed seconds of a move forward, and of its gradient's backward."""
        is_param = self.classes.tensors[edge.tensor].kind == "param"
        there, back = self.moves(operation, edge, is_result, dims, pieces, pending)
        forward, backward = (
            sum(count * self.network.move(edge.bytes, *move) for count, move in moves)
            for moves in (there, back)
        )
        if is_param:
            rates = self.rates
            seconds = (1 - rates.hide_gather) * forward + (1 - rates.hide_data) * backward
            return self.objective.microbatches * seconds
        return (1 - self.rates.hide_tensor) * (forward + backward)

    def moves(
        self,
        operation: OperationClass,
        edge: Edge,
        is_result: bool,
        dims: Dims,
        pieces: Dims,
        pending: frozenset[str],
    ) -> tuple[list[Move], list[Move]]:
        """Returns the moves forward, and of gradients backward."""
        if is_result:
            back = [(1, (dims, pieces, frozenset()))] if edge.differentiated else []
            return [(1, (pieces, dims, pending))], back
        # A tensor that is stored in parts is gathered again if its layer is computed again;
        # otherwise a compiler keeps what was gathered.
        again = 2 if self.classes.recomputes else 1
        back = [(1, (pieces, dims, pending))] if edge.differentiated else []
        return [(again, (dims, pieces, frozenset()))], back


def is_sensible(dims: Dims, pieces: Dims, pending: frozenset[str], is_param: bool) -> bool:
    """Returns whether a move is one that a program makes: few axes change, in whole blocks."""
    limit = _MAX_CHANGES["param" if is_param else "activation"]
    changes = num_changes(dims, pieces)
    few = (
        changes <= limit or is_nested(dims, pieces) or (pending and changes <= limit + len(pending))
    )
    return bool(few) and keeps_blocks(dims, pieces) and keeps_blocks(pieces, dims)
