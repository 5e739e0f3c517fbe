"""Other rules than those found: what each costs, and what binds."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from shardlib.cost.layout import AXES
from shardlib.errors import DoesNotFitError, PartitionError, RuleError, did_you_mean
from shardlib.find.problem import LayoutProblem, Solution
from shardlib.find.program import Part
from shardlib.humanize import duration, size
from shardlib.rules.resolve import STAGE, Kind

Names = Mapping[int, tuple[str | None, ...]]
"""The names of the dims of each tensor class."""
PARTS: Mapping[Part, str] = {
    "products": "products",
    "parameters": "exposed gathers and sums of parameters",
    "activations": "exposed moves of activations",
    "passes": "passes over memory",
}
_WORTH_NAMING = 0.1
"""Smallest part of a difference that is worth naming."""


@dataclasses.dataclass(frozen=True)
class WhyNotRule:
    """The answer for one rule."""

    rule: str
    """Such as `params.up: fsdp`."""
    reasons: tuple[str, ...]
    """Sentences without a full stop."""
    slower_seconds: float | None = None
    """Of a step with this rule and the best others, by the integer program. It is negative if the
    cost model of programs prefers a slower answer, and None if the rule is impossible or does not
    fit."""

    def __str__(self) -> str:
        return f"{self.rule}: {'; '.join(self.reasons)}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data."""
        return dataclasses.asdict(self) | {"reasons": list(self.reasons)}


@dataclasses.dataclass(frozen=True)
class Questions:
    """Questions about the solution of an integer program."""

    problem: LayoutProblem
    solution: Solution
    names: Names
    seconds: float
    """The time limit of each answer."""

    def why_not(self, text: str) -> WhyNotRule:
        """Returns what a rule would cost, such as `up: fsdp`, `activations.up: data+fsdp` or
        `up: null`. All other rules may change with it.

        Raises:
            RuleError: If the text is not a rule, or names an unknown axis.
        """
        table, name, axes = self._read(text)
        rule = f"{table}.{name}: {'+'.join(axes) or 'null'}"
        without, refused = self._others(table, name, axes)
        if not without and refused:
            return WhyNotRule(rule, tuple(dict.fromkeys(refused)))
        try:
            other = self.problem.solution(self.seconds, without=without)
        except (DoesNotFitError, PartitionError) as error:
            return WhyNotRule(rule, (str(error).partition("\n")[0].rstrip("."),))
        return WhyNotRule(rule, tuple(self._differences(other)), self._slower(other))

    def saved_seconds(self, table: Kind, name: str) -> float | None:
        """Returns by how much a step without a rule is slower, with the best other rules; None if
        the rule is given or nothing else fits."""
        without, _ = self._others(table, name, ())
        if not without:
            return None
        try:
            return max(self._slower(self.problem.solution(self.seconds, without=without)), 0.0)
        except (DoesNotFitError, PartitionError):
            return None

    def binding(self) -> str:
        """Returns what keeps a step from being quicker."""
        objective, solution = self.problem.objective, self.solution
        left = objective.capacity_bytes - objective.reserved_bytes
        if solution.memory_bytes > _NEARLY_FULL * left:
            free = dataclasses.replace(objective, capacity_bytes=math.inf)
            try:
                quickest = LayoutProblem(self.problem.classes, free).solution(self.seconds)
            except PartitionError:
                return "memory is nearly full; what more of it saves was not found in time"
            if quickest.seconds < solution.seconds * (1 - _GAP):
                less = duration(solution.seconds - quickest.seconds)
                return f"memory binds: with more of it a step would take {less} less"
        spent = solution.seconds_by_part
        part = max(PARTS, key=lambda part: spent[part])
        share = spent[part] / max(sum(spent[part] for part in PARTS), 1e-12)
        return f"{PARTS[part]} bind: {share:.0%} of a step"

    def _slower(self, other: Solution) -> float:
        return float(other.seconds - self.solution.seconds)

    def _read(self, text: str) -> tuple[Kind, str, tuple[str, ...]]:
        before, colon, after = str(text).rpartition(":")
        table, _, name = before.strip().partition(".")
        if table not in get_args(Kind):
            table, name = "", before.strip()
        after = after.strip().removeprefix("[").removesuffix("]").replace(",", "+")
        axes = () if after in ("", "null", "None", "-") else tuple(map(str.strip, after.split("+")))
        if not colon or not name or "" in axes or len(set(axes)) < len(axes):
            raise RuleError(
                f"{text!r} is not a rule.\n"
                "  Write the axis and its mesh axes, each once: 'up: fsdp' or 'up: fsdp+tensor'."
            )
        known = {kind: list(dict.fromkeys(self._named(kind))) for kind in get_args(Kind)}
        tables = [table] if table else ["params", "activations"]
        table = next((one for one in tables if name in known[one]), "")
        if not table:
            asked = f" for {tables[0]}" if len(tables) == 1 else ""
            meant = did_you_mean(name, [axis for one in tables for axis in known[one]])
            every = "; ".join(f"{one}: {', '.join(axes)}" for one, axes in known.items())
            raise RuleError(f"the rules{asked} have no axis {name!r}.{meant}\n  Axes of {every}.")
        self._refuse_stages(name, axes)
        have = self.problem.network.axes
        if wrong := [axis for axis in axes if axis not in have]:
            known = wrong[0] in AXES
            what = f"this mesh has {wrong[0]}=1" if known else f"the mesh has no axis {wrong[0]!r}"
            raise RuleError(
                f"{what}.{'' if known else did_you_mean(wrong[0], have)}\n"
                f"  It cuts along {', '.join(have) or 'nothing'}; ask about rules for another mesh."
            )
        return table, name, axes  # type: ignore[return-value]

    def _refuse_stages(self, name: str, axes: Sequence[str]) -> None:
        objective = self.problem.objective
        layers = {row[0] for number, row in self.names.items() if number in objective.layers}
        if objective.stages > 1 and (name in layers or STAGE in axes):
            raise RuleError(
                f"in a pipeline {STAGE} cuts the layers and nothing else, so that {name!r} cannot "
                "have this rule.\n"
                f"  Find rules for a mesh without {STAGE}, and compare their prices."
            )

    def _named(self, table: Kind) -> Iterator[str]:
        for number, row in self.names.items():
            if self._table(number) == table:
                yield from (name for name in row if name is not None)

    def _table(self, number: int) -> Kind:
        is_param = self.problem.classes.tensors[number].kind == "param"
        return "params" if is_param else "activations"

    def _others(self, table: Kind, name: str, axes: Sequence[str]) -> tuple[set[int], list[str]]:
        """Returns the columns of layouts that a rule rules out, and why tensors cannot follow it.
        A tensor that cannot follow is left free."""
        without: set[int] = set()
        refused = []
        parts = self.problem.network.degree(axes)
        for number, row in self.names.items():
            options = self.problem.layout_variables.get(number, {})
            if name not in row or self._table(number) != table or not options:
                continue
            dim = row.index(name)
            fitting = {c for dims, c in options.items() if set(dims[dim]) == set(axes)}
            if fitting:
                without |= set(options.values()) - fitting
                continue
            tensor = self.problem.classes.tensors[number]
            length = tensor.shape[dim]
            fixed = self.problem.objective.pinned_axes.get(tensor.axes[dim])
            reason = "the search does not cut it so"
            if length % parts:
                reason = f"{parts} does not divide it"
            elif fixed is not None:
                reason = f"the search always cuts it over {'+'.join(fixed) or 'nothing'}"
            refused.append(f"{name} of size {length}: {reason}")
        return without, refused

    def fixed(self, table: Kind, name: str) -> bool:
        """Returns whether all axes of a name are cut as the batch or its positions always are."""
        pinned = self.problem.objective.pinned_axes
        axes = {
            self.problem.classes.tensors[number].axes[row.index(name)]
            for number, row in self.names.items()
            if name in row and self._table(number) == table
        }
        return bool(axes) and axes <= set(pinned)

    def _differences(self, other: Solution) -> Iterator[str]:
        slower, base = self._slower(other), self.solution.seconds
        if abs(slower) <= _GAP * base:
            yield "as quick"
            return
        if slower < 0:
            yield (
                f"{duration(-slower)} quicker by the integer program, but the cost model of "
                "programs prices its answers slower"
            )
            return
        yield f"{duration(slower)} slower, {slower / base:.1%} of a step by the integer program"
        before, after = self.solution.seconds_by_part, other.seconds_by_part
        for part, words in PARTS.items():
            more = after[part] - before[part]
            if abs(more) > _WORTH_NAMING * slower:
                yield f"{duration(abs(more))} {'more' if more > 0 else 'less'} of {words}"
        more = other.memory_bytes - self.solution.memory_bytes
        if abs(more) > _WORTH_NAMING * self.solution.memory_bytes:
            yield f"{size(abs(more))} {'more' if more > 0 else 'less'} memory"


_NEARLY_FULL = 0.9
"""Part of the memory from which it may decide."""
_GAP = 1e-3
"""Relative difference that the solver does not tell apart."""
