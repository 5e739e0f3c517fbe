"""Operands of products that give way to the layout of what their result meets.

Layouts go from arguments to results in one pass. Compilers also take those that readers have: the
gradient of an activation is computed in the layout of the activation, and what a device then lacks
of an operand is gathered, once for all products that read it.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shardlib.cost.costs import Pass
from shardlib.cost.traced.attention import HEAD_NAMES, description, ruled
from shardlib.cost.traced.fusion import LOOPS
from shardlib.cost.traced.layout import MICRO, Axes, Spec, Spreading, ValueSharding
from shardlib.cost.traced.primitives import RULES, logical_axes_of, product_layout, result_dims
from shardlib.jaxprs import FlatProgram, Operation, is_literal
from shardlib.sharding.shared_rows import OPAQUE


class Partners:
    """The readers of a program's values, and the operands that products have gathered."""

    def __init__(
        self, program: FlatProgram, spread: Spreading, layouts: Mapping[Any, ValueSharding]
    ):
        self._spread, self._layouts = spread, layouts
        self._readers: dict[Any, list[Operation]] = collections.defaultdict(list)
        for operation in program.operations:
            for value in operation.invars:
                if not is_literal(value):
                    self._readers[value].append(operation)
        self._gathered: dict[tuple[Any, Pass], set[Spec]] = collections.defaultdict(set)

    def taken(
        self, operation: Operation, ins: Sequence[ValueSharding], during: Pass
    ) -> list[ValueSharding]:
        """Returns the layouts of a product's operands, of which activations are gathered over mesh
        axes that the other operand brings to where the result has them."""
        yielded = list(ins)
        if wanted := self._met(operation.outvars[0]):
            places = result_dims(operation)
            for i in (0, 1):
                if not ins[i].is_param:
                    yielded[i] = _yielding(ins[i], ins[1 - i], places[i], places[1 - i], wanted)
        silent = dataclasses.replace(self._spread, moved=lambda _: None)
        _, needed = product_layout(silent, operation, yielded)
        pairs = zip(operation.invars, ins, yielded, needed, strict=False)
        return [*(self._once(during, *one) for one in pairs), *ins[2:]]

    def _once(
        self,
        during: Pass,
        value: Any,
        laid: ValueSharding,
        yielded: ValueSharding,
        needed: ValueSharding,
    ) -> ValueSharding:
        """Returns the layout of an operand, gathered if that is not what the product itself does,
        and as it is taken if an earlier product of the same pass has gathered it so."""
        if laid.is_param or is_literal(value) or needed.spec == laid.spec:
            return laid
        gathered = self._gathered[value, during]
        if needed.spec in gathered:
            return dataclasses.replace(laid, spec=needed.spec)
        gathered.add(needed.spec)
        if yielded.spec != laid.spec:
            return self._spread.relaid(value.aval, laid, yielded.spec)
        return laid

    def _met(self, value: Any) -> Spec | None:
        """Returns the layout of what the readers of a value combine it with, or give to it. It goes
        on to what elementwise readers make."""
        left, seen = [value], {value}
        while left:
            for reader in self._readers[value := left.pop()]:
                found = self._met_in(reader, value)
                if found is not None and any(found):
                    return found
                if _is_elementwise(reader, value) and (made := reader.outvars[0]) not in seen:
                    seen.add(made)
                    left.append(made)
        return None

    def _met_in(self, reader: Operation, value: Any) -> Spec | None:
        shape = tuple(value.aval.shape)
        if reader.name == "sharding_constraint":
            names, kind = logical_axes_of(reader)
            return None if names is None else self._spread.resolve(names, shape, kind)
        if reader.name == OPAQUE and description(reader) is not None:
            named = dict(zip(reader.invars, HEAD_NAMES, strict=False))
            return ruled(self._spread, shape, named[value]) if value in named else None
        if not _is_elementwise(reader, value):
            return None
        others = (other for other in reader.invars if not is_literal(other) and other is not value)
        known = (self._layouts[other].spec for other in others if other in self._layouts)
        return next((spec for spec in known if len(spec) == len(shape) and any(spec)), None)


def _is_elementwise(reader: Operation, value: Any) -> bool:
    """Returns whether an operation makes a value of the shape of one that it reads, dim by dim."""
    if reader.name in RULES or reader.name in LOOPS or len(reader.outvars) != 1:
        return False
    made: Any = reader.outvars[0]
    return made.aval.shape == value.aval.shape


def _yielding(
    laid: ValueSharding,
    other: ValueSharding,
    places: Mapping[int, int],
    other_places: Mapping[int, int],
    wanted: Spec,
) -> ValueSharding:
    """Returns the layout of an operand without the mesh axes of its free dims that the wanted
    result has on another dim, on which the other operand has them."""
    brought = {a for dim, at in other_places.items() for a in other.spec[dim] if a in wanted[at]}

    def kept(dim: int, axes: Axes) -> Axes:
        at = places.get(dim)
        if at is None:
            return axes
        return tuple(a for a in axes if a == MICRO or a in wanted[at] or a not in brought)

    spec = tuple(kept(dim, axes) for dim, axes in enumerate(laid.spec))
    return dataclasses.replace(laid, spec=spec)
