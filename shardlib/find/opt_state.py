"""Optimizer state in more parts than its parameters.

Where every device has a parameter whole, its optimizer state may still be in parts: each device
updates a part of the parameter, and the updated parts are gathered once a step.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 5.1.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import Jaxpr

from shardlib.find.equivalence import MIN_ELEMENTS, Classes, TensorClass
from shardlib.jaxprs import Operation, flatten, subprograms
from shardlib.partitioner.factors import ELEMENTWISE
from shardlib.partitioner.layout import Dims
from shardlib.rules import AxisRules

Cut = tuple[str, ...]
"""Mesh axes of a dim."""
_MADE = frozenset({"broadcast_in_dim", "iota", "random_bits"})
"""Operations whose results are made in parts."""
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})
_MOST_LEFT = 0.01
"""Part of its operand that a reduction may leave, so that a sum over devices costs little next to
the gather of the updated parameter."""


def updates_apart(update: Jaxpr) -> bool:
    """Returns whether an optimizer can update each part of a parameter on another device.

    Elements may meet in reductions to a few numbers, such as a norm or the rows and columns of
    Adafactor (Shazeer and Stern 2018). In a product of matrices, as Muon has, all parts would be
    gathered first.

    Args:
        update: The program of an update, from gradients, optimizer state and parameters.
    """
    return all(map(_is_apart, flatten(update).operations))


def _is_apart(operation: Operation) -> bool:
    def elements(atoms: Sequence) -> int:
        return max((math.prod(getattr(x.aval, "shape", ())) for x in atoms), default=0)

    taken, made = elements(operation.invars), elements(operation.outvars)
    if max(taken, made) < MIN_ELEMENTS:
        return True  # Small parameters have whole state.
    if inner := list(subprograms(operation.equation)):
        return all(map(updates_apart, inner))
    if operation.name in _REDUCTIONS:
        return made <= _MOST_LEFT * taken
    return operation.name in ELEMENTWISE or operation.name in _MADE


class StateCuts:
    """The further cuts of optimizer state on a mesh. The axis that most parameters have comes
    first, so that few rules do for all of them.

    Args:
        classes: The classes of the traced loss.
        axes: The mesh axes that may cut optimizer state and not its parameters.
        sizes: The devices along each mesh axis.
    """

    def __init__(self, classes: Classes, axes: Sequence[str], sizes: Mapping[str, int]):
        self._classes, self.axes, self._sizes = classes, axes, sizes
        self._elements = collections.Counter[int]()
        for tensor in classes.tensors:
            for axis in tensor.axes if tensor.copies else ():
                self._elements[axis] += tensor.copies * tensor.elements

    def further(self, tensor: TensorClass, dims: Dims) -> dict[int, Cut]:
        """Returns the mesh axes that cut the optimizer state of a parameter with the layout `dims`
        in addition, by dim.

        A small parameter has none. Layers stay whole, because a loop makes one gradient after the
        other, and so do dims without a name in a parameter that the model names.
        """
        if tensor.kind != "param" or tensor.is_small or not tensor.trained:
            return {}
        used = {axis for cut in dims for axis in cut}
        found: dict[int, Cut] = {}
        for dim in sorted(range(len(dims)), key=lambda dim: self._rank(tensor, dims, dim)):
            free = [a for a in self.axes if a not in used]
            if self._classes.axes[tensor.axes[dim]].is_layers or not _has_rule(tensor, dim):
                continue
            more = next(c for c in _most_first(free) if self._divides(tensor, dim, dims[dim] + c))
            if more:
                found[dim] = more
                used.update(more)
        return found

    def by_class(self, layouts: Mapping[int, Dims]) -> dict[int, dict[int, Cut]]:
        """Returns the further cuts of all parameters, by tensor class."""
        tensors = self._classes.tensors
        return {number: self.further(tensors[number], dims) for number, dims in layouts.items()}

    def _rank(self, tensor: TensorClass, dims: Dims, dim: int) -> tuple[bool, int, int]:
        """Returns the place of a dim in the order of a tensor: as in rules, cut dims come first."""
        return not dims[dim], -self._elements[tensor.axes[dim]], tensor.axes[dim]

    def _divides(self, tensor: TensorClass, dim: int, cut: Cut) -> bool:
        return tensor.shape[dim] % math.prod(self._sizes[axis] for axis in cut) == 0


def _has_rule(tensor: TensorClass, dim: int) -> bool:
    return not tensor.names or tensor.names[dim] is not None


def _most_first(free: Sequence[str]) -> list[Cut]:
    """Returns all subsets of mesh axes, from the largest to none."""
    counts = range(len(free), -1, -1)
    return [cut for n in counts for cut in itertools.combinations(free, n)]


def with_state_cut(rules: AxisRules, names: Collection[str], axes: Sequence[str]) -> AxisRules:
    """Returns rules with a table for the optimizer state: the mesh axes `axes` also cut the dims of
    `names`, as far as they divide them. Another name may have to leave such an axis to them."""
    table: dict[str, list[str | None]] = {}
    for name, alternatives in rules.params:
        own = alternatives[0]
        free = [axis for axis in axes if axis not in own] if name in names else []
        cuts = dict.fromkeys([*(own + more for more in _most_first(free)), *alternatives, ()])
        if any(cuts):
            table[name] = ["+".join(cut) or None for cut in cuts]
    return dataclasses.replace(rules, opt_state=rules.override(table)) if names else rules
