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
from shardlib.cost.traced.primitives import REDUCTIONS
from shardlib.cost.traced.products import PRODUCTS
from shardlib.jaxprs import FlatProgram, Operation, is_literal

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
_SOLID = (
    PRODUCTS
    | LOOPS
    | frozenset(
        (
            *("gather", "scatter", "scatter-add", "sort", "top_k", "cumsum", "fft"),
            *("reduce_window", "reduce_window_max", "reduce_window_sum"),
            *("select_and_scatter_add", "select_and_gather_add", "custom_call", "pallas_call"),
            *("cholesky", "triangular_solve", "dynamic_update_slice", "concatenate"),
            "random_bits",
        )
    )
)
"""Operations that read and write their own arrays, whatever surrounds them."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations that run as one kernel."""

    end: int
    """Index of the last operation of the group."""
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    stack: str
    own: bool
    """Whether its bytes are counted elsewhere, with a product or with an inner program."""


@functools.lru_cache(maxsize=4096)
def fusion(program: FlatProgram) -> tuple[Group, ...]:
    """Returns the groups of a program, in the order of their ends."""
    return _Fusing(program).groups()


class _Fusing:
    """Fusion decisions: the values of a program that are written to memory.

    Results of solid operations, of reductions and of the program are written, and so are the
    operands of solid operations. A value that several groups read is written if that moves fewer
    bytes than recomputing it in each group from the values it is made of.
    """

    def __init__(self, program: FlatProgram):
        self.program = program
        self.solid = [operation.name in _SOLID for operation in program.operations]
        self.users: dict[Any, list[int]] = {}
        for index, operation in enumerate(program.operations):
            for value in dict.fromkeys(v for v in operation.invars if not is_literal(v)):
                self.users.setdefault(value, []).append(index)
        self.outputs = {value for value in program.outvars if not is_literal(value)}
        self.reads: dict[Any, dict[Any, None]] = {}
        """Written values from which each unwritten value is computed."""

    def groups(self) -> tuple[Group, ...]:
        groups = []
        for index, operation in enumerate(self.program.operations):
            reads: dict[Any, None] = {}
            for value in operation.invars:
                if not is_literal(value):
                    reads.update(self.reads.get(value, {value: None}))
            if self._is_written(index, operation, reads):
                own = operation.name in PRODUCTS or operation.name in LOOPS
                group = Group(index, tuple(reads), operation.outvars, operation.stack, own)
                groups.append(group)
            else:
                self.reads.update(dict.fromkeys(operation.outvars, reads))
        return tuple(groups)

    def _is_written(self, index: int, operation: Operation, reads: Mapping[Any, None]) -> bool:
        name = operation.name
        is_result = bool(self.outputs.intersection(operation.outvars))
        if self.solid[index] or name in REDUCTIONS or is_result:
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

    def step(self, index: int, num_bytes: Callable[[Any], float], inside: float) -> None:
        """Allocates the results of an operation and frees values without further readers.

        Args:
            index: Index of the operation.
            num_bytes: Bytes of a result.
            inside: Peak bytes of a program that the operation runs, including results.
        """
        group = self.ends.get(index)
        if group is None:
            return
        kept = {v: num_bytes(v) for v in group.writes if v in self.last and v not in self.apart}
        self.peak = max(self.peak, self.now + max(inside, sum(kept.values())))
        self.held |= kept
        self.now += sum(kept.values())
        for var in group.reads:
            if self.last[var] == index:
                self.now -= self.held.pop(var, 0.0)
