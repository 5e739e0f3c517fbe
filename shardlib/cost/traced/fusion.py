"""Fusion of a traced program: the values that a compiler writes to memory, and their lifetimes.

Elementwise operations run inside their readers. A value is written if a matmul, a reduction, a loop
or more than one such group reads it, and each group reads each array once. XLA fuses in about this
way (Snider and Liang 2023, "Operator Fusion in XLA: Analysis and Evaluation", section 3).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from shardlib.cost.traced.layout import nbytes
from shardlib.cost.traced.primitives import COLLECTIVES, REDUCTIONS
from shardlib.cost.traced.products import PRODUCTS
from shardlib.jaxprs import FlatProgram, Operation, array_of, is_literal
from shardlib.sharding.shared_rows import OPAQUE

LOOPS = frozenset(("scan", "while", "cond"))
"""Operations that run an inner program."""
_FREE = frozenset(
    (
        *("broadcast_in_dim", "iota", "reshape", "squeeze", "expand_dims", "convert_element_type"),
        *("reduce_precision", "copy", "transpose", "stop_gradient", "sharding_constraint", "name"),
        *("random_wrap", "random_unwrap", "optimization_barrier"),
    )
)
"""Operations that are recomputed wherever their result is read instead of being written."""
_COUNTED = PRODUCTS | LOOPS | COLLECTIVES.keys()
"""Operations whose bytes are counted elsewhere."""
_SOLID = _COUNTED | frozenset(
    (
        *("gather", "scatter", "scatter-add", "sort", "top_k", "cumsum", "fft"),
        *("reduce_window", "reduce_window_max", "reduce_window_sum"),
        *("select_and_scatter_add", "select_and_gather_add", "custom_call", "pallas_call"),
        *("cholesky", "triangular_solve", "dynamic_update_slice", "concatenate"),
        *("random_bits", OPAQUE),
    )
)
"""Operations that read and write their own arrays, whatever surrounds them."""
_MOVES = frozenset(("pad", "slice", "dynamic_slice", "rev", "split"))
"""Operations that a compiler fuses with elementwise ones, but not into a product."""
_INTO = {"tpu": frozenset(("conv_general_dilated", "dot_general"))}
"""Products into which a compiler fuses the elementwise operations before and after them, by
platform (read from compiled steps)."""


_ONCE = {"tpu": frozenset(("erfc",))}
"""Elementwise operations of so many instructions that a compiler does not compute them again, by
platform (read from compiled steps)."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations that run as one kernel."""

    end: int
    """Index of the last operation of the group."""
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    stack: str
    own: bool
    """Whether its bytes are counted elsewhere, with a product, a collective or an inner program."""


@functools.lru_cache(maxsize=4096)
def fusion(program: FlatProgram, platform: str | None = None) -> tuple[Group, ...]:
    """Returns the groups of a program, in the order of their ends. `platform` is that of the
    devices; None if it is not known."""
    return _Fusing(program, platform).groups()


class _Fusing:
    """Fusion decisions: the values of a program that are written to memory.

    Results of solid operations, of reductions and of the program are written, and so are the
    operands of solid operations. A value that several groups read is written if that moves fewer
    bytes than recomputing it in each group from the values it is made of. The products in `_INTO`
    compute elementwise operands where they read them. In place of a result they write what
    elementwise operations make of it, if these alone read it.
    """

    def __init__(self, program: FlatProgram, platform: str | None):
        self.program = program
        self.into = _INTO.get(platform or "", frozenset())
        self.once = _ONCE.get(platform or "", frozenset())
        solid = _SOLID - {"concatenate"} if self.into else _SOLID
        self.solid = [operation.name in solid for operation in program.operations]
        self.users: dict[Any, list[int]] = {}
        for index, operation in enumerate(program.operations):
            for value in dict.fromkeys(v for v in operation.invars if not is_literal(v)):
                self.users.setdefault(value, []).append(index)
        self.outputs = {value for value in program.outvars if not is_literal(value)}
        self.reads: dict[Any, dict[Any, None]] = {}
        """Written values from which each unwritten value is computed."""
        self.widened: set[Any] = set()
        """Results of conversions that are written for solid operations alone."""
        self.moved: set[Any] = set()
        """Unwritten values that are made of elements at other positions."""
        self.ends_product: set[int] = set()
        """Elementwise operations that a product before them writes."""

    def groups(self) -> tuple[Group, ...]:
        groups = []
        for index, operation in enumerate(self.program.operations):
            operands = [value for value in operation.invars if not is_literal(value)]
            reads: dict[Any, None] = {}
            for value in operands:
                wide = self.solid[index] and value in self.widened
                reads.update({value: None} if wide else self.reads.get(value, {value: None}))
            moves = operation.name in _MOVES or not self.moved.isdisjoint(operands)
            if self._is_written(index, operation, reads, moves=moves):
                own = operation.name in _COUNTED
                group = Group(index, tuple(reads), operation.outvars, operation.stack, own)
                groups.append(group)
                if self.into and self._widens(operation):
                    # Others read the source, which is smaller.
                    self.widened.update(operation.outvars)
                    self.reads.update(dict.fromkeys(operation.outvars, reads))
                last = self._last_within(operation)
                if last is not None:
                    self.ends_product.add(last)
                    self.reads.update((made, {}) for made in operation.outvars)
            else:
                self.reads.update(dict.fromkeys(operation.outvars, reads))
                if moves:
                    self.moved.update(operation.outvars)
        return tuple(groups)

    def _is_written(
        self, index: int, operation: Operation, reads: Mapping[Any, None], *, moves: bool
    ) -> bool:
        name = operation.name
        is_result = bool(self.outputs.intersection(operation.outvars))
        if self.solid[index] or name in REDUCTIONS or is_result or index in self.ends_product:
            return True
        if name in _FREE and name != "convert_element_type":
            return False
        users = self._readers(operation)
        names = {self.program.operations[user].name for user in users if self.solid[user]}
        if names - self.into or (names and moves):
            return True
        moved = sum(self.program.operations[user].name in _MOVES for user in users)
        if self.into and moved > 1:
            return True
        if name in _FREE or len(users) < 2:
            return False
        if name in self.once:
            return True
        made = sum(nbytes(value.aval) for value in operation.outvars)
        again = sum(nbytes(value.aval) for value in reads)
        return again + (1 + len(users)) * made < len(users) * again

    def _last_within(self, operation: Operation) -> int | None:
        """Returns the last elementwise operation that a product applies to its result before it
        writes it, if these operations alone read it; otherwise None."""
        if operation.name not in self.into:
            return None
        (made,) = operation.outvars
        last, open_values = None, {made: set(self.users.get(made, ()))}
        while not self.outputs.intersection(open_values) and all(open_values.values()):
            index = min(min(users) for users in open_values.values())
            reader = self.program.operations[index]
            if not self._is_elementwise(index) or made.aval.size != reader.outvars[0].aval.size:
                break
            for users in open_values.values():
                users.discard(index)
            open_values = {value: users for value, users in open_values.items() if users}
            open_values |= {value: set(self.users.get(value, ())) for value in reader.outvars}
            if len(open_values) == 1 and reader.name not in _FREE:
                last = index
        return last

    def _widens(self, operation: Operation) -> bool:
        if operation.name != "convert_element_type" or self.outputs.intersection(operation.outvars):
            return False
        (value,), (made,) = operation.invars, operation.outvars
        before = array_of(value).dtype  # type: ignore[arg-type]
        return made.aval.dtype.itemsize > before.itemsize

    def _is_elementwise(self, index: int) -> bool:
        return not self.solid[index] and self.program.operations[index].name not in REDUCTIONS

    def _readers(self, operation: Operation) -> set[int]:
        """Returns the operations that read a value, directly or through recomputed operations. A
        conversion for a solid operation is written instead of its operand."""
        readers: set[int] = set()
        waiting = [user for value in operation.outvars for user in self.users.get(value, ())]
        while waiting:
            index = waiting.pop()
            reader = self.program.operations[index]
            if reader.name not in _FREE or self.outputs.intersection(reader.outvars):
                readers.add(index)
                continue
            for user in (u for value in reader.outvars for u in self.users.get(value, ())):
                if reader.name == "convert_element_type" and self.solid[user]:
                    readers.add(index)
                else:
                    waiting.append(user)
        return readers


class Live:
    """Bytes alive in program order. A value lives from its creation to the last group that reads
    it."""

    def __init__(self, program: FlatProgram, groups: Sequence[Group], apart: Collection[Any]):
        self.last = {value: group.end for group in groups for value in group.reads}
        end = len(program.operations)
        self.last |= {value: end for value in program.outvars if not is_literal(value)}
        self.ends = {group.end: group for group in groups}
        self.apart = apart
        self.held, self.now, self.peak = dict[Any, float](), 0.0, 0.0

    def step(
        self,
        index: int,
        num_bytes: Callable[[Any], float],
        inside: float,
        copied: Mapping[Any, float],
    ) -> None:
        """Allocates the results of an operation and frees values without further readers.

        Args:
            index: Index of the operation.
            num_bytes: Bytes of a result.
            inside: Peak bytes of a program that the operation runs, including results.
            copied: Bytes of the copies of arguments that it reads, which live as long as values.
        """
        group = self.ends.get(index)
        if group is None:
            return
        kept = {v: num_bytes(v) for v in group.writes if v in self.last and v not in self.apart}
        kept |= {v: size for v, size in copied.items() if v not in self.held}
        self.peak = max(self.peak, self.now + max(inside, sum(kept.values())))
        self.held |= kept
        self.now += sum(kept.values())
        for var in group.reads:
            if self.last[var] == index:
                self.now -= self.held.pop(var, 0.0)
