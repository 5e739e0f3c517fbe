"""What a traced program computes, passes over and sends, on one device of a mesh.

FLOPs     A multiply-add is two. Matmuls and convolutions alone count; of a convolution the zeros
          between the elements of a dilated operand do not, what is padded at its rim does.
Bytes     Of everything else, by two conventions. *Unfused*: each operation reads its operands and
          writes its results. *Fused*: operations that go element by element run inside of what
          reads them; written is what a matmul, a reduction, a loop or more than one such group
          reads, and each group reads each array once. XLA fuses about so (Snider and Liang 2023,
          "Operator Fusion in XLA: Analysis and Evaluation", section 3).
Loops     Count as often as they run; `while` loops with a bound that is not traced, once.
Peak      Bytes alive at a time, of written values, in the order of the program.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from shardlib.plan.jaxpr_flat import Operation, Program, flatten, is_literal
from shardlib.plan.jaxpr_layout import Laid, Moved, Spec, Spreading, nbytes, replicated
from shardlib.plan.jaxpr_rules import keeps_summands, product_layout, results

Way = Literal["forward", "backward", "again"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EXPONENTIALS = _names("exp exp2 log log1p expm1 tanh logistic erf sin cos pow")
_FREE = _names(
    "broadcast_in_dim iota reshape squeeze expand_dims convert_element_type reduce_precision copy "
    "transpose stop_gradient sharding_constraint name random_wrap random_unwrap "
    "optimization_barrier"
)
"""Operations that are done again wherever their result is read, rather than written."""
_PRODUCTS = _names("dot_general conv_general_dilated ragged_dot ragged_dot_general")
_SOLID = _PRODUCTS | _names(
    "gather scatter scatter-add sort top_k cumsum fft reduce_window reduce_window_max "
    "reduce_window_sum select_and_scatter_add select_and_gather_add scan while cond custom_call "
    "pallas_call cholesky triangular_solve dynamic_update_slice concatenate random_bits"
)
"""Operations that read and write arrays of their own, whatever surrounds them."""
_REDUCTIONS = _names(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_or reduce_and reduce_xor argmax argmin"
)
_LOOPS = _names("scan while cond")
_NOTHING = _names("reshape squeeze sharding_constraint name")


@dataclasses.dataclass(frozen=True)
class Product:
    """Matmuls or a convolution as one device runs them."""

    rows: float
    fan_in: float
    fan_out: float
    groups: float
    num_bytes: float
    """Of operands and result."""
    width: int
    """Bytes of a number of an operand."""

    @property
    def flops(self) -> float:
        """FLOPs of all of them."""
        return 2.0 * self.rows * self.fan_in * self.fan_out * self.groups


@dataclasses.dataclass
class Costs:
    """What one device does in one run of a program."""

    products: Counter[tuple[Way, Product]] = dataclasses.field(default_factory=Counter)
    moved: Counter[tuple[Way, Moved]] = dataclasses.field(default_factory=Counter)
    fused_bytes: Counter[Way] = dataclasses.field(default_factory=Counter)
    unfused_bytes: Counter[Way] = dataclasses.field(default_factory=Counter)
    exponentials: Counter[Way] = dataclasses.field(default_factory=Counter)
    kernels: Counter[Way] = dataclasses.field(default_factory=Counter)
    """Passes over memory, each a kernel to be started."""
    peak_bytes: float = 0.0
    """Of values other than arguments."""
    kept_bytes: float = 0.0
    """Of values that the forward pass writes and another pass reads."""

    def flops(self, *ways: Way) -> float:
        """FLOPs of matmuls and convolutions, of all ways where none is named."""
        return sum(
            count * product.flops
            for (way, product), count in self.products.items()
            if not ways or way in ways
        )

    def add(self, other: "Costs", times: float) -> None:
        """Adds another program that runs so many times."""
        for field in dataclasses.fields(self):
            mine, more = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                for key, count in more.items():
                    mine[key] += count * times  # type: ignore[index]


class Walk:
    """Walks a program with the layouts of its arguments, and counts."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        resolve: Callable[[tuple[str | None, ...], tuple[int, ...], str], Spec],
    ):
        self.sizes, self.resolve = sizes, resolve

    def run(
        self, jaxpr: Any, laids: Sequence[Laid], stack: str = "", *, apart: int = 0
    ) -> tuple[list[Laid], Costs]:
        """Returns the layouts of the results, and the costs of one run.

        Args:
            jaxpr: A `jax.core.Jaxpr`.
            laids: Layouts of its constants and arguments.
            stack: Name stack of what calls it.
            apart: How many of the first results are not to count in `peak_bytes`.
        """
        program, costs, at = flatten(jaxpr), Costs(), _Here(stack)
        spread = Spreading(self.sizes, self.resolve, lambda m: _count(costs.moved, (at.way, m)))
        env: dict[Any, Laid] = dict(zip(program.invars, laids, strict=True))

        def read(value: Any) -> Laid:
            # Neither a literal nor a constant of a function within is cut.
            if is_literal(value) or value not in env:
                return replicated(value.aval)
            return env[value]

        live = _Live(program, fusion(program), set(program.outvars[:apart]))
        for index, operation in enumerate(program.operations):
            at.stack = f"{stack}/{operation.stack}"
            ins = [read(value) for value in operation.invars]
            inner = Costs()
            if operation.name in _LOOPS:
                outs, inner = self._loop(operation, ins, at.stack, spread)
                costs.add(inner, 1)
            else:
                if not keeps_summands(operation, ins):
                    ins = self._settled(operation, ins, env, spread)
                outs = results(spread, operation, ins)
                if operation.name in _PRODUCTS:
                    _count(costs.products, (at.way, _product(spread, operation, ins, outs)))
                _passes(spread, operation, ins, outs, costs, at.way)
            env.update(zip(operation.outvars, outs, strict=True))
            made = {v: spread.num_bytes(v.aval, env[v]) for v in operation.outvars}
            live.step(index, made, inner.peak_bytes)
        _fused(program, env, spread, costs, stack)
        costs.peak_bytes = live.peak
        return [read(value) for value in program.outvars], costs

    def _settled(
        self, operation: Operation, ins: list[Laid], env: dict[Any, Laid], spread: Spreading
    ) -> list[Laid]:
        """Operands with their summands added up, once for all that read them."""
        for value, laid in zip(operation.invars, ins, strict=True):
            if laid.partial and env[value].partial:
                env[value] = spread.whole(value.aval, laid)
        pairs = zip(operation.invars, ins, strict=True)
        return [laid if is_literal(value) else env.get(value, laid) for value, laid in pairs]

    def _loop(
        self, operation: Operation, ins: list[Laid], stack: str, spread: Spreading
    ) -> tuple[list[Laid], Costs]:
        if operation.name == "scan":
            return self._scan(operation, ins, stack, spread)
        if operation.name == "while":
            return self._while(operation, ins, stack)
        branches = [branch.jaxpr for branch in operation.params["branches"]]
        runs = [self.run(branch, ins[1:], stack) for branch in branches]
        return max(runs, key=lambda run: run[1].flops() + run[1].peak_bytes)

    def _scan(
        self, operation: Operation, ins: list[Laid], stack: str, spread: Spreading
    ) -> tuple[list[Laid], Costs]:
        params = operation.params
        body = params["jaxpr"].jaxpr
        fixed, carried, trips = params["num_consts"], params["num_carry"], params["length"]
        consts, carry = ins[:fixed], ins[fixed : fixed + carried]
        carry = [
            spread.whole(v.aval, laid)
            for v, laid in zip(operation.invars[fixed : fixed + carried], carry, strict=True)
        ]
        xs = [dataclasses.replace(laid, spec=laid.spec[1:]) for laid in ins[fixed + carried :]]
        outs, costs = self.run(body, (*consts, *carry, *xs), stack)
        # What the body makes of the carry is what it is given from the second trip on.
        settled = [dataclasses.replace(laid, partial=(), is_param=False) for laid in outs[:carried]]
        if [laid.spec for laid in settled] != [laid.spec for laid in carry]:
            outs, costs = self.run(body, (*consts, *settled, *xs), stack)
        total = Costs()
        total.add(costs, trips)
        total.peak_bytes = costs.peak_bytes
        for var, laid in zip(body.outvars[:carried], outs[:carried], strict=True):
            spread.whole(var.aval, laid)
        stacked = [dataclasses.replace(laid, spec=((), *laid.spec)) for laid in outs[carried:]]
        return [
            *(dataclasses.replace(laid, partial=()) for laid in outs[:carried]),
            *stacked,
        ], total

    def _while(self, operation: Operation, ins: list[Laid], stack: str) -> tuple[list[Laid], Costs]:
        params = operation.params
        skipped, fixed = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = ins[skipped : skipped + fixed], ins[skipped + fixed :]
        outs, costs = self.run(params["body_jaxpr"].jaxpr, (*consts, *carry), stack)
        return [dataclasses.replace(laid, partial=()) for laid in outs], costs


def _passes(
    spread: Spreading,
    operation: Operation,
    ins: Sequence[Laid],
    outs: Sequence[Laid],
    costs: Costs,
    way: Way,
) -> None:
    """Counts exponentials, and the bytes of an operation by itself."""
    pairs = zip(operation.outvars, outs, strict=True)
    made = sum(spread.num_bytes(value.aval, laid) for value, laid in pairs)
    if operation.name in _EXPONENTIALS:
        costs.exponentials[way] += made / operation.outvars[0].aval.dtype.itemsize  # type: ignore[assignment]
    if operation.name in _PRODUCTS or operation.name in _NOTHING:
        return
    pairs = zip(operation.invars, ins, strict=True)
    read = sum(spread.num_bytes(value.aval, laid) for value, laid in pairs)
    costs.unfused_bytes[way] += made + read  # type: ignore[assignment]


def _fused(
    program: Program, env: Mapping[Any, Laid], spread: Spreading, costs: Costs, stack: str
) -> None:
    """Counts the kernels of a program, what they move, and what the backward pass finds."""
    made: set[Any] = set()
    kept: set[Any] = set()
    for group in fusion(program).groups:
        way = way_of(f"{stack}/{group.stack}")
        if way == "forward":
            made.update(group.writes)
        else:
            kept.update(value for value in group.reads if value in made)
        if not group.own:
            values = (*group.reads, *group.writes)
            moved = sum(spread.num_bytes(v.aval, env[v]) for v in values if v in env)
            costs.fused_bytes[way] += moved  # type: ignore[assignment]
            costs.kernels[way] += 1
    costs.kept_bytes = sum(spread.num_bytes(value.aval, env[value]) for value in kept)


@dataclasses.dataclass
class _Here:
    stack: str

    @property
    def way(self) -> Way:
        return way_of(self.stack)


def way_of(stack: str) -> Way:
    """Returns the pass that an operation belongs to, from the names of what JAX transformed."""
    if "rematted_computation" in stack or "checkpoint/rematted" in stack:
        return "again"
    return "backward" if "transpose(" in stack else "forward"


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations that run as one kernel."""

    end: int
    """The last of them."""
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    stack: str
    own: bool
    """Whether its bytes are counted elsewhere: those of a product, or of a program that it runs."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """What of a program is written, by the convention of this module."""

    groups: tuple[Group, ...]
    written: frozenset[Any]


@functools.lru_cache(maxsize=4096)
def fusion(program: Program) -> Fusion:
    """Returns the fusion of a program."""
    return _Fusing(program).fusion()


class _Fusing:
    """Decides which values of a program are written.

    Results of what runs by itself, of reductions and of the program are, and what the first of
    these take as operands. What several groups read is written where that moves fewer bytes than
    doing it again in each of them from what they read then.
    """

    def __init__(self, program: Program):
        self.program = program
        self.solid = [operation.name in _SOLID for operation in program.operations]
        self.users: dict[Any, list[int]] = {}
        for index, operation in enumerate(program.operations):
            for value in dict.fromkeys(v for v in operation.invars if not is_literal(v)):
                self.users.setdefault(value, []).append(index)
        self.outputs = {value for value in program.outvars if not is_literal(value)}
        self.reads: dict[Any, dict[Any, None]] = {}
        """Of a value that is not written: what is, and it is made of."""

    def fusion(self) -> Fusion:
        groups, written = [], set[Any]()
        for index, operation in enumerate(self.program.operations):
            reads: dict[Any, None] = {}
            for value in operation.invars:
                if not is_literal(value):
                    reads.update(self.reads.get(value, {value: None}))
            if self._is_written(index, operation, reads):
                written.update(operation.outvars)
                own = operation.name in _PRODUCTS or operation.name in _LOOPS
                found = Group(index, tuple(reads), operation.outvars, operation.stack, own)
                groups.append(found)
            else:
                self.reads.update(dict.fromkeys(operation.outvars, reads))
        return Fusion(tuple(groups), frozenset(written))

    def _is_written(self, index: int, operation: Operation, reads: Mapping[Any, None]) -> bool:
        name = operation.name
        is_result = bool(self.outputs.intersection(operation.outvars))
        if self.solid[index] or name in _REDUCTIONS or is_result:
            return True
        if name in _FREE and name != "convert_element_type":
            return False
        users = self._readers(operation)
        if any(self.solid[user] for user in users):
            return True
        if name in _FREE or len(users) < 2:
            return False
        made = sum(nbytes(value.aval) for value in operation.outvars)
        again = sum(nbytes(value.aval) for value in reads)
        return again + (1 + len(users)) * made < len(users) * again

    def _readers(self, operation: Operation) -> set[int]:
        """Operations that read a value, by way of those that are done again as often as needed.
        A conversion for what runs by itself is written in its stead."""
        found: set[int] = set()
        waiting = [user for value in operation.outvars for user in self.users.get(value, ())]
        while waiting:
            index = waiting.pop()
            reader = self.program.operations[index]
            if reader.name not in _FREE or self.outputs.intersection(reader.outvars):
                found.add(index)
                continue
            for user in (u for value in reader.outvars for u in self.users.get(value, ())):
                if reader.name == "convert_element_type" and self.solid[user]:
                    found.add(index)
                else:
                    waiting.append(user)
        return found


class _Live:
    """Bytes alive, in the order of a program: a value from its making to the last group that reads
    it."""

    def __init__(self, program: Program, fusion: Fusion, apart: Collection[Any]):
        self.last = {value: group.end for group in fusion.groups for value in group.reads}
        end = len(program.operations)
        self.last |= {value: end for value in program.outvars if not is_literal(value)}
        self.ends = {group.end: group for group in fusion.groups}
        self.written, self.apart = fusion.written, apart
        self.held, self.now, self.peak = dict[Any, float](), 0.0, 0.0

    def step(self, index: int, made: Mapping[Any, float], inside: float) -> None:
        """Makes the results of an operation and frees what nothing reads any more."""
        if index not in self.ends:
            return
        kept = {v: n for v, n in made.items() if v in self.last and v not in self.apart}
        # What runs inside holds its results too.
        self.peak = max(self.peak, self.now + max(inside, sum(kept.values())))
        self.held |= kept
        self.now += sum(kept.values())
        for var in self.ends[index].reads:
            if self.last[var] == index:
                self.now -= self.held.pop(var, 0.0)


def _product(
    spread: Spreading, operation: Operation, ins: list[Laid], outs: Sequence[Laid]
) -> Product:
    """The matmul that one device runs for a product or a convolution."""
    avals = [var.aval for var in operation.invars[:2]]
    out = operation.outvars[0].aval
    if operation.name not in ("dot_general", "conv_general_dilated"):
        return _ragged(spread, avals, ins, out, outs[0])
    _, taken = product_layout(_silent(spread), operation, ins)
    made = spread.num_bytes(out, outs[0])
    held = [spread.num_bytes(aval, laid) for aval, laid in zip(avals, taken, strict=True)]
    numbers = made / out.dtype.itemsize
    width = avals[0].dtype.itemsize
    if operation.name == "dot_general":
        (dims, other), (batch, _) = operation.params["dimension_numbers"]
        del other
        shape = _local(spread, avals[0], taken[0])
        fan_in = math.prod(shape[d] for d in dims)
        groups = math.prod(shape[d] for d in batch)
        rows = math.prod(shape) / max(fan_in * groups, 1)
        fan_out = numbers / max(rows * groups, 1)
        return Product(rows, fan_in, fan_out, groups, made + sum(held), width)
    params = operation.params
    numbering = params["dimension_numbers"]
    kernel = _local(spread, avals[1], taken[1])
    useful = math.prod(params["lhs_dilation"])
    fan_in = math.prod(kernel[d] for d in numbering.rhs_spec[1:]) / useful
    fan_out = _local(spread, out, outs[0])[numbering.out_spec[1]]
    return Product(numbers / fan_out, fan_in, fan_out, 1.0, made + sum(held), width)


def _ragged(
    spread: Spreading, avals: Sequence[Any], ins: Sequence[Laid], out: Any, laid: Laid
) -> Product:
    """Rows that each meet the matrix of their group."""
    held = sum(spread.num_bytes(a, one) for a, one in zip(avals, ins, strict=False))
    made = spread.num_bytes(out, laid)
    rows, fan_in = _local(spread, avals[0], ins[0])[-2:]
    fan_out = made / out.dtype.itemsize / rows
    return Product(rows, fan_in, fan_out, 1.0, held + made, out.dtype.itemsize)


def _local(spread: Spreading, aval: Any, laid: Laid) -> list[float]:
    return [n / spread.shards(axes) for n, axes in zip(aval.shape, laid.spec, strict=True)]


def _silent(spread: Spreading) -> Spreading:
    """The same mesh, with nothing recorded."""
    return dataclasses.replace(spread, moved=lambda _: None)


def _count(counter: Counter[Any], key: Any) -> None:
    counter[key] += 1
