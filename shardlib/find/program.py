"""An integer program, solved by HiGHS."""

import array
import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np

Part = Literal["products", "parameters", "activations", "passes", "rules"]
"""The kind of a cost: products, moves of parameters or of activations, passes over memory, or rules
in the table."""
_GAP = 1e-3


@dataclasses.dataclass(frozen=True)
class Optimum:
    """What a solver found."""

    values: np.ndarray | None
    """Of each variable; None without an answer."""
    seconds: float
    bound_seconds: float
    out_of_time: bool


class IntegerProgram:
    """Variables between 0 and 1 with costs in seconds, and linear constraints."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.parts: list[Part] = []
        self._whole: list[bool] = []
        # The matrix by rows. Pairs in lists would be a million objects for the garbage collector.
        self._columns, self._factors = array.array("i"), array.array("d")
        self._ends = array.array("i", [0])
        self._lower, self._upper = array.array("d"), array.array("d")

    def variable(self, cost: float, part: Part, *, whole: bool = False) -> int:
        """Adds a variable and returns its column; `whole` variables are 0 or 1."""
        self.costs.append(cost)
        self.parts.append(part)
        self._whole.append(whole)
        return len(self.costs) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """Bounds a sum of columns with factors."""
        for column, factor in terms:
            self._columns.append(column)
            self._factors.append(factor)
        self._ends.append(len(self._columns))
        self._lower.append(lower)
        self._upper.append(upper)

    def solve(
        self, seconds: float, ones: Collection[int] = (), zeros: Collection[int] = ()
    ) -> Optimum:
        """Minimises the costs, within a time limit in seconds, with some variables at 1 or 0."""
        columns = np.arange(len(self.costs))
        lower = np.isin(columns, list(ones)).astype(float)
        upper = 1.0 - np.isin(columns, list(zeros))
        options = {"time_limit": seconds, "mip_rel_gap": _GAP}
        costs, whole = np.array(self.costs), np.array(self._whole, int)
        found, scale = _highs(costs, self._constraints(), whole, (lower, upper), options)
        if found.x is None:
            return Optimum(None, math.inf, -math.inf, found.status == 1)
        least, bound = float(found.fun) / scale, float(found.mip_dual_bound) / scale
        return Optimum(found.x, least, bound, found.status == 1)

    def relaxed(self) -> "Relaxation":
        """Returns the linear program without the condition that variables are whole."""
        costs, parts = np.array(self.costs), np.array(self.parts)
        by_part = {part: np.where(parts == part, costs, 0.0) for part in get_args(Part)}
        return Relaxation(by_part, self._constraints())

    def _constraints(self) -> Any:
        # Their import takes a third of a second, for which every run would wait.
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_matrix

        parts = [np.array(part) for part in (self._factors, self._columns, self._ends)]
        matrix = csr_matrix(tuple(parts), shape=(len(self._lower), len(self.costs)))
        return LinearConstraint(matrix, np.array(self._lower), np.array(self._upper))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Relaxation:
    """Bounds an integer program from below: its variables have any value between 0 and 1."""

    costs: Mapping[Part, np.ndarray]
    constraints: Any

    def least_seconds(self, times: Mapping[Part, float]) -> float:
        """Returns the least sum of the costs of some parts, each of them so many times; infinity
        without a solution."""
        costs = np.sum([count * self.costs[part] for part, count in times.items()], axis=0)
        found, scale = _highs(costs, self.constraints, np.zeros(len(costs), int), (0.0, 1.0), {})
        return math.inf if found.fun is None else found.fun / scale


def _highs(
    costs: np.ndarray, constraints: Any, whole: np.ndarray, limits: tuple[Any, Any], options: dict
) -> tuple[Any, float]:
    """Returns what HiGHS found for costs, and their scale."""
    from scipy.optimize import Bounds, milp

    # HiGHS works with absolute tolerances near 1e-6: scale the largest cost to about 1e3.
    scale = 1e3 / max(float(costs.max()), 1e-12)
    bounds = Bounds(*limits)
    found = milp(
        costs * scale, integrality=whole, bounds=bounds, constraints=constraints, options=options
    )
    return found, scale
