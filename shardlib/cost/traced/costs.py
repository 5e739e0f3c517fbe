"""Counts of a traced program on one device of a mesh, and the costs of its step.

FLOPs     A multiply-add counts as two. Only matmuls and convolutions count. In a convolution the
          zeros between the elements of a dilated operand do not count, but edge padding does.
Bytes     Memory traffic of all other operations, as a compiler fuses them (`fusion`).
Loops     Loops count once per iteration; `while` loops with an untraced bound count once.
Peak      Bytes of written values alive at the same time, in program order.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardlib.cost.costs import CollectiveCost, Costs, Pass, Window, Work, pass_of
from shardlib.cost.layout import AXES, Layout
from shardlib.cost.machine.kernels import FLASH_TIMES, FusedAttention, Product, Stream
from shardlib.cost.traced.attention import attention_flops, description
from shardlib.cost.traced.fusion import LOOPS, Live, fusion
from shardlib.cost.traced.layout import Axes, Moved, Spec, Spreading, ValueSharding, replicated
from shardlib.cost.traced.partners import Partners
from shardlib.cost.traced.primitives import keeps_summands, results
from shardlib.cost.traced.products import PRODUCTS, RAGGED, product
from shardlib.cost.traced.tiles import lane_padding, least_padding, operand_padding
from shardlib.jaxprs import FlatProgram, Operation, array_of, flatten, is_literal, scan_parts
from shardlib.nn.attention.kernel import Kernel
from shardlib.rules.resolve import STAGE
from shardlib.sharding.shared_rows import OPAQUE

_EXPONENTIALS = frozenset(
    (
        *("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf"),
        *("sin", "cos", "pow"),
    )
)


_PASSES: tuple[Pass, ...] = ("forward", "backward", "recompute")


@dataclasses.dataclass
class Tally:
    """Counts of one run of a program on one device."""

    products: Counter[tuple[Pass, Product]] = dataclasses.field(default_factory=Counter)
    attended: Counter[tuple[Pass, Kernel]] = dataclasses.field(default_factory=Counter)
    """FLOPs of attention kernels for all pairs, without those that their backward pass repeats."""
    moved: Counter[tuple[Pass, Moved]] = dataclasses.field(default_factory=Counter)
    fused_bytes: Counter[Pass] = dataclasses.field(default_factory=Counter)
    exponentials: Counter[Pass] = dataclasses.field(default_factory=Counter)
    kernels: Counter[Pass] = dataclasses.field(default_factory=Counter)
    """Passes over memory; each is one kernel launch."""
    peak_bytes: float = 0.0
    """Peak bytes of values other than arguments."""
    kept_bytes: float = 0.0
    """Bytes of values that the forward pass writes and another pass reads."""
    staged: "Tally | None" = None
    """Counts of the layers of one stage, if `stage` cuts a loop; they are in no other count."""
    num_layers: int = 1
    """Layers of that loop."""
    carried_bytes: float = 0.0
    """Bytes that a device passes from one of these layers to the next."""

    def flops(self, *passes: Pass) -> float:
        """Returns the FLOPs of matmuls and convolutions, of all passes if none is named."""
        counted = [(own, count * product.flops) for (own, product), count in self.products.items()]
        counted += [(own, flops) for (own, _), flops in self.attended.items()]
        flops = sum(flops for own, flops in counted if not passes or own in passes)
        return flops if self.staged is None else flops + self.staged.flops(*passes)

    def add(self, other: "Tally", times: float) -> None:
        """Adds the counts of another program that runs `times` times."""
        for field in dataclasses.fields(self):
            mine, more = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, Counter):
                for key, count in more.items():
                    mine[key] += count * times  # type: ignore[index]
        if other.staged is not None:
            self.staged = self.staged or Tally()
            self.staged.add(other.staged, times)
            self.staged.kept_bytes += other.staged.kept_bytes * times
            self.num_layers = other.num_layers
            self.carried_bytes = max(self.carried_bytes, other.carried_bytes)

    def work(
        self, during: Pass | None = None, *, part: str | None = None, attention: str = "flash"
    ) -> list[Work]:
        """Returns the kernels of the program, all in the pass `during` and of `part` if they are
        given. `attention` names attention kernels, as in `Software`."""
        part = part or during
        kernels = [
            Work(during or own, part or "matmul", product, count)
            for (own, product), count in self.products.items()
        ]
        for (own, of_kernel), flops in self.attended.items():
            backward = own == "backward"
            # The gradients of two products are four.
            of_forward = flops * of_kernel.share * FLASH_TIMES[attention] / (2 if backward else 1)
            kernel = FusedAttention(of_forward, of_kernel.head_dim, backward=backward)
            kernels.append(Work(during or own, part or "attention", kernel))
        for own in _PASSES:
            passed = Stream(self.fused_bytes[own], self.exponentials[own], self.kernels[own])
            kernels.append(Work(during or own, part or "elementwise", passed))
        return kernels


def step_costs(
    gradient: Tally,
    update: Tally,
    layout: Layout,
    *,
    late: Axes,
    sums_twice: bool,
    attention: str = "flash",
) -> Costs:
    """Returns the costs of a step from the counts of one microbatch, `gradient`, and of the
    optimizer. Gradients are summed over the axes `late` once a step. `sums_twice`: whether a
    float32 sum has twice the bytes of a sum in the program's dtype. `attention` names attention
    kernels, as in `Software`."""
    each, once = [], []
    started: set[tuple[Axes, str]] = set()
    staged = gradient.staged or Tally()
    for (during, moved), count in itertools.chain(gradient.moved.items(), staged.moved.items()):
        for collective in _collectives(during, moved, layout, late, started):
            if collective.overlap == "data" and set(collective.axes) <= set(late):
                # The sum is in float32, with nothing left to hide behind.
                times = count * (2 if sums_twice else 1)
                once.append(collective._replace(count=times, overlap=None))
            else:
                each.append(collective._replace(count=count))
    started = set()
    for (during, moved), count in update.moved.items():
        for one in _collectives(during, moved, layout, (), started):
            once.append(one._replace(part="optimizer", count=count, overlap=None))
    part = None if gradient.staged is None else "head"
    work = gradient.work(part=part, attention=attention) + staged.work(attention=attention)
    return Costs(work, each, update.work("optimizer"), once, gradient.num_layers)


def _collectives(
    during: Pass, moved: Moved, layout: Layout, late: Axes, started: set[tuple[Axes, str]]
) -> Iterator[CollectiveCost]:
    """Yields a collective as it runs on a layout; one over several axes counts for the outermost.

    Small gradients are summed together with large ones and share their start. Sums over axes in
    `late` wait for the end of a step, and are separate from those over other axes.
    """
    axes = tuple(axis for axis in AXES if axis in moved.axes)
    if moved.kind == "shift":  # of keys and values, while tiles of attention are computed
        yield CollectiveCost(
            axes[0], moved.kind, axes, moved.num_bytes, 1.0, 1.0, "gather", "attention"
        )
    elif not moved.of_param:
        size = moved.num_bytes
        collective = CollectiveCost(
            axes[0], moved.kind, axes, size, 1.0, 1.0, "activations", "layers"
        )
        yield collective
    elif moved.kind not in ("all_reduce", "reduce_scatter"):
        window: Window = "forward" if during == "forward" else "backward"
        yield CollectiveCost(axes[0], moved.kind, axes, moved.num_bytes, 1.0, 1.0, "gather", window)
    else:
        size = moved.num_bytes
        waits = tuple(axis for axis in axes if axis in late)
        now = tuple(axis for axis in axes if axis not in late)
        for group in filter(None, (now, waits)):
            pieces = float((group, moved.kind) not in started)
            started.add((group, moved.kind))
            yield CollectiveCost(group[0], moved.kind, group, size, pieces, 1.0, "data", "backward")
            size /= math.prod(layout.size(axis) for axis in group)


_SAME_SHAPE = ("convert_element_type", "neg", "copy", "reduce_precision")


def _summed(operation: Operation) -> Any:
    """Returns the operand whose sum over devices may come before or after an operation of one
    array, if it keeps its shape."""
    if operation.name in _SAME_SHAPE:
        return operation.invars[0]
    invars: Sequence[Any] = operation.invars
    arrays = [v for v in invars if math.prod(v.aval.shape) != 1]
    scales = operation.name in ("mul", "div") and len(arrays) == 1
    return arrays[0] if scales and arrays[0] is operation.invars[0] else None


class Walk:
    """Walker of a program that propagates layouts from its arguments and counts costs."""

    def __init__(
        self,
        sizes: Mapping[str, float],
        resolve: Callable[[tuple[str | None, ...], tuple[int, ...], str], Spec],
        platform: str | None = None,
    ):
        self.sizes, self.resolve, self.platform = sizes, resolve, platform

    def run(
        self,
        jaxpr: Any,
        shardings: Sequence[ValueSharding],
        stack: str = "",
        *,
        gradients: Sequence[Spec] = (),
    ) -> tuple[list[ValueSharding], Tally]:
        """Returns the layouts of the results, and the costs of one run of a `jax.core.Jaxpr`, whose
        constants and arguments have the layouts `shardings`. `stack` is the name stack of the
        caller. The first results end in the layouts `gradients`: loops that sum them scatter them,
        and the rest is left to the caller. `peak_bytes` leaves them out."""
        run = _Run(self, flatten(jaxpr, compiled=True), shardings, stack)
        return run.outs(gradients), run.costs

    def body(
        self,
        jaxpr: Any,
        shardings: Sequence[ValueSharding],
        stack: str,
        wanted: Sequence[Spec | None] = (),
    ) -> tuple[list[ValueSharding], Tally]:
        """Returns what `run` does for the program of a loop or a branch, whose captured arrays are
        whole. Results that are sums are scattered to the layouts `wanted`."""
        captured = [replicated(var.aval) for var in jaxpr.constvars]
        program = flatten(jaxpr, compiled=True)
        run = _Run(self, program, (*captured, *shardings), stack)
        outs = run.outs((), wanted)
        return run.scattered(outs, wanted), run.costs


class _Result(NamedTuple):
    """The layouts of the results of an operation, its collectives, and its matmul if it is one."""

    outs: list[ValueSharding]
    sent: list[Moved]
    product: Product | None


class _Run:
    """One run of a program."""

    def __init__(
        self, walk: Walk, program: FlatProgram, shardings: Sequence[ValueSharding], stack: str
    ):
        self.walk, self.program, self.stack = walk, program, stack
        self.costs = Tally()
        self.during: Pass = pass_of(stack, "forward")
        self.spread = Spreading(walk.sizes, walk.resolve, self._moved)
        self.env: dict[Any, ValueSharding] = dict(zip(program.invars, shardings, strict=True))
        self.of_kernels: set[Any] = set()
        """Operands and results of attention kernels."""
        self.partners = Partners(program, self.spread, self.env)
        self.known: dict[tuple[int, tuple[ValueSharding, ...]], _Result] = {}

    def outs(
        self, gradients: Sequence[Spec], wanted: Sequence[Spec | None] = ()
    ) -> list[ValueSharding]:
        """Runs the program and returns the layouts of its results, of which the first have the
        layouts `gradients` or `wanted` in the end."""
        self.wanted = self._wanted_of_loops([*gradients, *wanted])
        groups = fusion(self.program, self.walk.platform)
        kernels = (one for one in self.program.operations if one.name == OPAQUE)
        self.of_kernels = {v for one in kernels for v in (*one.invars, *one.outvars)}
        ends = self.program.outvars[: len(gradients)]
        live = Live(self.program, groups, {one for one in ends if not is_literal(one)})
        for index, operation in enumerate(self.program.operations):
            stack = f"{self.stack}/{operation.stack}"
            self.during = pass_of(stack, "forward")
            inside = self._operation(index, operation, stack)
            live.step(index, self._held_at_once, inside, self._copies(operation))
        self._fused()
        self.costs.peak_bytes = live.peak
        return [self._read(value) for value in self.program.outvars]

    def _wanted_of_loops(self, wanted: Sequence[Spec | None]) -> dict[Any, Spec]:
        """Returns the layouts in which results of loops end."""
        made: dict[Any, Operation] = {
            out: one for one in self.program.operations for out in one.outvars
        }
        found = {}
        value: Any
        for value, spec in zip(self.program.outvars, wanted, strict=False):
            while spec is not None and not is_literal(value) and value in made:
                if made[value].name == "scan":
                    found[value] = spec
                value = _summed(made[value])
        return found

    def scattered(
        self, outs: Sequence[ValueSharding], wanted: Sequence[Spec | None]
    ) -> list[ValueSharding]:
        """Returns the layouts of results that are sums over mesh axes of their wanted layouts after
        these sums."""
        self.during = pass_of(self.stack, "forward")
        given = dict(enumerate(wanted))
        return [
            self._scattered(var.aval, laid, given.get(number))
            for number, (var, laid) in enumerate(zip(self.program.outvars, outs, strict=True))
        ]

    def _scattered(self, aval: Any, laid: ValueSharding, wanted: Spec | None) -> ValueSharding:
        spec = self.spread.fitting(aval.shape, wanted) if wanted is not None else ()
        over = {axis for axes in spec for axis in axes}
        now = tuple(axis for axis in laid.partial if axis in over)
        if not now:
            return laid
        left = tuple(axis for axis in laid.partial if axis not in over)
        summed = dataclasses.replace(laid, partial=now, is_param=True)
        spec = self.spread.relaid(aval, summed, spec).spec
        return ValueSharding(spec, left, laid.is_param, laid.width if left else 0)

    def _operation(self, index: int, operation: Operation, stack: str) -> float:
        """Lays out the results of an operation. Returns the peak bytes of the program that it
        runs."""
        ins = [self._read(value) for value in operation.invars]
        inside = 0.0
        if operation.name in LOOPS:
            outs, inner = self._loop(operation, ins, stack)
            self.costs.add(inner, 1)
            inside = inner.peak_bytes
        else:
            if not keeps_summands(operation, ins):
                ins = self._settled(operation, ins)
            outs = self._results(index, operation, ins)
            if operation.name == OPAQUE:
                self._attend(operation, outs[0])
        self.env.update(zip(operation.outvars, outs, strict=True))
        if operation.name in _EXPONENTIALS:
            (made,) = operation.outvars
            numbers = self._held(made) / made.aval.dtype.itemsize
            self.costs.exponentials[self.during] += numbers  # type: ignore[assignment]
        return inside

    def _attend(self, operation: Operation, out: ValueSharding) -> None:
        """Counts attention that is one operation."""
        if (what := description(operation)) is not None:
            flops = attention_flops(self.spread, operation, out)
            self.costs.attended[self.during, what.kernel] += flops  # type: ignore[assignment]

    def _results(
        self, index: int, operation: Operation, ins: list[ValueSharding]
    ) -> list[ValueSharding]:
        """Returns the layouts of the results of an operation without an inner program, and counts
        what it sends and multiplies. Layers repeat: equal operations are laid out once."""
        if operation.name in PRODUCTS and operation.name not in RAGGED:
            ins = self.partners.taken(operation, ins, self.during)
        key = self.program.kinds[index], tuple(ins)
        if key not in self.known:
            sent: list[Moved] = []
            outs = results(dataclasses.replace(self.spread, moved=sent.append), operation, ins)
            multiplies = operation.name in PRODUCTS
            made = product(self.spread, operation, ins, outs) if multiplies else None
            self.known[key] = _Result(outs, sent, made)
        outs, sent, made = self.known[key]
        for moved in sent:
            self._moved(moved)
        if made is not None:
            self.costs.products[self.during, made] += 1
        return outs

    def _moved(self, moved: Moved) -> None:
        self.costs.moved[self.during, moved] += 1

    def _read(self, value: Any) -> ValueSharding:
        # Literals and constants of inner functions are replicated.
        if is_literal(value) or value not in self.env:
            return replicated(array_of(value))
        return self.env[value]

    def _held(self, value: Any) -> float:
        return self.spread.num_bytes(value.aval, self.env[value])

    def _held_at_once(self, value: Any) -> float:
        """Returns the bytes of a value in memory, padded as its platform does. Attention kernels
        take heads in lanes."""
        held = self._held(value)
        if self.walk.platform != "tpu":
            return held
        dims = self._dims(value)
        in_lanes = value in self.of_kernels and len(dims) == 4
        return held * (lane_padding(dims[-1]) if in_lanes else least_padding(dims))

    def _copies(self, operation: Operation) -> Mapping[Any, float]:
        """Returns the bytes of arguments that a convolution on TPUs copies into its own layout: of
        images with few channels a multiple."""
        if self.walk.platform != "tpu" or operation.name != "conv_general_dilated":
            return {}
        images = operation.invars[0]
        if is_literal(images) or images not in self.program.invars:
            return {}
        dims, spec = self._dims(images), operation.params["dimension_numbers"].lhs_spec
        return {images: self._held(images) * operand_padding(dims[spec[0]], dims[spec[1]])}

    def _dims(self, value: Any) -> list[float]:
        """Returns the dims of a value on one device."""
        laid = self.env[value]
        pairs = zip(value.aval.shape, laid.spec, strict=True)
        return [size / self.spread.shards(axes) for size, axes in pairs]

    def _settled(self, operation: Operation, ins: list[ValueSharding]) -> list[ValueSharding]:
        """Returns the operands with their summands reduced, once for all readers."""
        for value, laid in zip(operation.invars, ins, strict=True):
            if laid.partial and self.env[value].partial:
                self.env[value] = self.spread.whole(value.aval, laid)
        pairs = zip(operation.invars, ins, strict=True)
        return [laid if is_literal(value) else self.env.get(value, laid) for value, laid in pairs]

    def _loop(
        self, operation: Operation, ins: list[ValueSharding], stack: str
    ) -> tuple[list[ValueSharding], Tally]:
        if operation.name == "scan":
            return self._scan(operation, ins, stack)
        if operation.name == "while":
            return self._while(operation, ins, stack)
        branches = [branch.jaxpr for branch in operation.params["branches"]]
        runs = [self.walk.body(branch, ins[1:], stack) for branch in branches]
        return max(runs, key=lambda run: run[1].flops() + run[1].peak_bytes)

    def _scan(
        self, operation: Operation, ins: list[ValueSharding], stack: str
    ) -> tuple[list[ValueSharding], Tally]:
        params = operation.params
        body = params["jaxpr"].jaxpr
        (fixed, carried), trips = scan_parts(operation), params["length"]
        consts, carry = ins[:fixed], ins[fixed : fixed + carried]
        carry = [
            self.spread.whole(v.aval, laid)
            for v, laid in zip(operation.invars[fixed : fixed + carried], carry, strict=True)
        ]
        xs = [dataclasses.replace(laid, spec=laid.spec[1:]) for laid in ins[fixed + carried :]]
        stacks = [self.wanted.get(var) for var in operation.outvars[carried:]]
        wanted = [*(None,) * carried, *(None if spec is None else spec[1:] for spec in stacks)]
        outs, costs = self.walk.body(body, (*consts, *carry, *xs), stack, wanted)
        # From the second iteration on the body receives the carry in the layout that it returns.
        settled = [dataclasses.replace(laid, partial=(), is_param=False) for laid in outs[:carried]]
        if [laid.spec for laid in settled] != [laid.spec for laid in carry]:
            outs, costs = self.walk.body(body, (*consts, *settled, *xs), stack, wanted)
        total = Tally(peak_bytes=costs.peak_bytes)
        stages = next((x.spec[0] for x in ins[fixed + carried :] if x.spec[0] == (STAGE,)), ())
        if stages:
            own = trips / self.spread.shards(stages)
            total.staged, total.num_layers = Tally(), trips
            total.staged.add(costs, own)
            # The loop of the backward pass also carries gradients of what layers share.
            if self.during == "forward":
                held = [
                    self.spread.num_bytes(v.aval, laid)
                    for v, laid in zip(body.outvars, outs, strict=True)
                ]
                total.carried_bytes = sum(held[:carried])
                total.staged.kept_bytes = own * sum(held[carried:])
        else:
            total.add(costs, trips)
        for var, laid in zip(body.outvars[:carried], outs[:carried], strict=True):
            self.spread.whole(var.aval, laid)
        ends = [dataclasses.replace(laid, partial=()) for laid in outs[:carried]]
        stacked = [dataclasses.replace(laid, spec=(stages, *laid.spec)) for laid in outs[carried:]]
        return [*ends, *stacked], total

    def _while(
        self, operation: Operation, ins: list[ValueSharding], stack: str
    ) -> tuple[list[ValueSharding], Tally]:
        params = operation.params
        skipped, fixed = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = ins[skipped : skipped + fixed], ins[skipped + fixed :]
        outs, costs = self.walk.body(params["body_jaxpr"].jaxpr, (*consts, *carry), stack)
        return [dataclasses.replace(laid, partial=()) for laid in outs], costs

    def _fused(self) -> None:
        """Counts the kernels, the bytes they move, and the bytes kept for the backward pass."""
        made: set[Any] = set()
        kept: set[Any] = set()
        for group in fusion(self.program, self.walk.platform):
            during = pass_of(f"{self.stack}/{group.stack}", "forward")
            if during == "forward":
                made.update(group.writes)
            else:
                kept.update(value for value in group.reads if value in made)
            if not group.own:
                values = [v for v in (*group.reads, *group.writes) if v in self.env]
                counts = self._counts_of(values)
                counts.fused_bytes[during] += sum(map(self._held, values))  # type: ignore[assignment]
                counts.kernels[during] += 1
        self.costs.kept_bytes = sum(map(self._held, kept))

    def _counts_of(self, values: Sequence[Any]) -> Tally:
        """Returns the counts for values that a kernel reads and writes: of a stage for its layers
        outside of their loop too, such as copies of their parameters in another dtype."""
        staged = self.costs.staged
        of_layers = staged is not None and any(STAGE in self.env[v].axes for v in values)
        return staged if staged is not None and of_layers else self.costs
