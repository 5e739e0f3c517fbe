"""Layouts that the readers of a value want, followed backwards through a program.

A gradient is a sum over the batch. If the optimizer state is sharded, a device reads only a part of
each gradient. A sum taken straight into that part is a reduce-scatter, which sends half the bytes
of an all-reduce, and a loop that stacks gradients of layers then stacks parts of them.
"""

import collections
from collections.abc import Mapping, Sequence

from shardlib.jaxprs import Atom, FlatProgram, Operation, Value, is_literal
from shardlib.partitioner.factors import ELEMENTWISE, Factors, dims_of, factors_of
from shardlib.partitioner.layout import Dims, ValueLayout

_FAR = 8
"""Number of operations to look ahead."""
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_SUM_OF_TERMS = frozenset(("add_any", "transpose"))
_FOLLOWED = ELEMENTWISE | {"transpose", "squeeze", "reshape", "broadcast_in_dim"}


def wanted_layouts(
    flat: FlatProgram, outputs: Sequence[Dims | None], planned: Mapping[Value, Dims]
) -> dict[Atom, Dims]:
    """Returns the dims that readers want, by variable."""
    wanted: dict[Atom, Dims] = {}

    def want(atom: Atom, dims: Dims | None) -> None:
        if dims is not None and any(dims) and not is_literal(atom):
            wanted.setdefault(atom, dims)

    for atom, dims in zip(flat.outvars, outputs, strict=True):
        want(atom, dims)
    for operation in flat.operations if planned else ():
        for var in operation.outvars:
            want(var, planned.get(var))
    if not wanted:
        return wanted
    for operation in reversed(flat.operations):
        if operation.name not in _FOLLOWED:
            continue
        result = wanted.get(operation.outvars[0])
        factors = factors_of(operation) if result is not None else None
        if result is None or factors is None:
            continue
        for number, atom in enumerate(operation.invars):
            want(atom, _through(factors, number, result))
    return wanted


def _through(factors: Factors, operand: int, result: Dims) -> Dims:
    pairs = zip(factors.results[0], result, strict=True)
    cut = {factor: axes for factor, axes in pairs if factor is not None}
    return dims_of(factors.operands[operand], cut)


class Readers:
    """The readers of each value, known before the walk reaches them.

    `at` holds the layouts of the values that the walk has passed.
    """

    def __init__(self, flat: FlatProgram, at: Mapping[Atom, ValueLayout]):
        self.at = at
        self._inputs = frozenset(flat.invars)
        self._readers: dict[Atom, list[Operation]] = collections.defaultdict(list)
        self._makers: dict[Atom, Operation] = {}
        self._terms: dict[Value, int] = {}
        for operation in flat.operations:
            self._makers.update(dict.fromkeys(operation.outvars, operation))
            for atom in operation.invars:
                if not is_literal(atom):
                    self._readers[atom].append(operation)

    def wants(self, var: Value, depth: int = _FAR) -> Dims | None:
        """Returns the dims of another operand of a reader; None if unknown."""
        for operation in self._readers[var] if depth else ():
            if operation.name not in _FOLLOWED:
                continue
            others = [v for v in operation.invars if v is not var and not is_literal(v)]
            peers = (self._guess(v, depth) for v in others if v.aval.shape == var.aval.shape)
            dims = next(filter(None, peers), None)
            if dims is None and (onward := self.wants(operation.outvars[0], depth - 1)):
                factors = factors_of(operation)
                number = operation.invars.index(var)
                dims = _through(factors, number, onward) if factors else None
            if dims is not None and any(dims):
                return dims
        return None

    def num_lookups(self, table: Atom) -> int | None:
        """Returns how many lookups read a table; None if anything else reads it."""
        readers = self._readers.get(table, ())
        is_table = all(r.name == "gather" and r.invars[1] is not table for r in readers)
        return len(readers) if is_table else None

    def num_terms(self, var: Value) -> int:
        """Returns how many products are added to one gradient with a value, itself included: a sum
        over devices is taken once of all of them."""
        path = [var]
        while path[-1] not in self._terms:
            after = self._only_reader(path[-1])
            if after is None or after.name not in _SUM_OF_TERMS:
                self._terms[path[-1]] = max(self._count_terms(path[-1]), 1)
            else:
                path.append(after.outvars[0])
        terms = self._terms[path[-1]]
        self._terms |= dict.fromkeys(path, terms)
        return terms

    def running_sum(self, var: Value) -> Atom | None:
        """Returns the input of the program to which a value is added, by additions alone: in the
        body of a loop, a sum over its trips."""
        while (after := self._only_reader(var)) is not None and after.name == "add_any":
            sums = (v for v in after.invars if not is_literal(v) and v in self._inputs)
            total = next(sums, None)
            if total is not None:
                return total
            var = after.outvars[0]
        return None

    def _count_terms(self, total: Value) -> int:
        terms, left = 0, [total]
        while left:
            maker = self._makers.get(left.pop())
            if maker and maker.name in _SUM_OF_TERMS:
                left += [v for v in maker.invars if not is_literal(v) and self._only_reader(v)]
            elif maker:
                terms += maker.name in _PRODUCTS
        return terms

    def _only_reader(self, var: Atom) -> Operation | None:
        readers = self._readers.get(var, ())
        return readers[0] if len(readers) == 1 else None

    def _guess(self, var: Atom, depth: int) -> Dims | None:
        """Returns the future layout of a value computed elementwise from known ones."""
        layout, maker = self.at.get(var), self._makers.get(var)
        if layout is not None:
            return layout.dims if layout.axes and not layout.made else None
        if maker is None or maker.name not in ELEMENTWISE or not depth:
            return None
        same = (v for v in maker.invars if not is_literal(v) and v.aval.shape == var.aval.shape)
        return next(filter(None, (self._guess(v, depth - 1) for v in same)), None)
