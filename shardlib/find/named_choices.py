"""One rule for each name by which a model places tensors.

A name has one variable for each set of mesh axes, of which exactly one is 1. A layout of a tensor
is possible only if it is what the rules of its names make of it, as `rules.resolve` does: a dim is
whole if its rule does not divide it, or if a mesh axis of the rule cuts a dim of a name before it.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardlib.cost.traced.primitives import PARAMS_TABLE
from shardlib.find.axes import Names
from shardlib.find.equivalence import Classes
from shardlib.find.experts import EXPERT, FoundExperts
from shardlib.find.program import IntegerProgram
from shardlib.partitioner.layout import Dims

Cut = tuple[str, ...]
"""Mesh axes of a dim."""


class NamedChoices:
    """The variables of the rules of names."""

    def __init__(
        self,
        program: IntegerProgram,
        classes: Classes,
        sizes: Mapping[str, int],
        cuts: Iterable[Cut],
        param_axes: frozenset[str],
        experts: FoundExperts,
        rule_seconds: float,
    ):
        self._program, self._sizes = program, sizes
        weights: dict[str, float] = collections.defaultdict(float)
        for tensor in classes.tensors:
            for name in tensor.names:
                if name is not None:
                    weights[name] += tensor.weight
        for operation in classes.operations:
            for edge in operation.operands:
                for name in edge.read_as:
                    if name is not None:
                        weights[name] += 0.0
        self.names = sorted(weights, key=lambda name: (-weights[name], name))
        """All names, in the order in which rules take mesh axes."""
        self.columns: dict[str, dict[Cut, int]] = {}
        """The variable of each rule of each name."""
        cuts = list(cuts)
        for name in self.names:
            of_params = name.startswith(PARAMS_TABLE)
            allowed = param_axes | ({EXPERT} if name in experts.names else set())
            possible = [cut for cut in cuts if not of_params or allowed.issuperset(cut)]
            if name in experts.names and experts.in_region and EXPERT in sizes:
                possible = [(EXPERT,)]  # The program does not show what else would cost.
            self.columns[name] = {
                cut: program.variable(rule_seconds * len(cut), "rules", whole=True)
                for cut in possible
            }
            program.row([(column, 1.0) for column in self.columns[name].values()], 1, 1)

    def tie(self, names: Names, shape: Sequence[int], columns: Iterable[tuple[Dims, int]]) -> None:
        """Allows each layout of a tensor only with the rules that make it. The variables that
        choose the columns sum to 1."""
        columns = list(columns)
        for dim, name in enumerate(names):
            if name is None:
                continue
            before = self._before(names, dim)
            laid = [
                ({axis for other in before for axis in dims[other]}, dims[dim], one)
                for dims, one in columns
            ]
            for rule, column in self.columns[name].items():
                divides = shape[dim] % math.prod(self._sizes[axis] for axis in rule) == 0
                having = [
                    one
                    for taken, cut, one in laid
                    if cut == (rule if divides and taken.isdisjoint(rule) else ())
                ]
                self._program.row([*((one, 1.0) for one in having), (column, -1.0)], 0, 1)

    def _before(self, names: Names, dim: int) -> list[int]:
        """Returns the dims whose rules take mesh axes before that of `dim`."""
        ranks = {at: self.names.index(name) for at, name in enumerate(names) if name is not None}
        return [other for other in ranks if (ranks[other], other) < (ranks[dim], dim)]

    def rules(self, values: np.ndarray) -> dict[str, Cut]:
        """Returns the chosen rule of each name, in their order."""
        return {
            name: max(columns, key=lambda cut: values[columns[cut]])
            for name, columns in self.columns.items()
        }
