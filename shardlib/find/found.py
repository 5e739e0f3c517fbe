"""Found rules, and what they cost."""

import dataclasses
import functools
import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from jax.sharding import Mesh

from shardlib.config import to_dict
from shardlib.explain.report.html_page import document
from shardlib.find.equivalence import Classes
from shardlib.find.names import by_pattern
from shardlib.find.problem import Solution
from shardlib.find.traffic import Traffic
from shardlib.find.why_not import PARTS, Questions, WhyNotRule
from shardlib.humanize import duration, size
from shardlib.mesh import abstract_mesh, make_mesh
from shardlib.rules import AxisRules, RulesConfig
from shardlib.rules.resolve import Kind
from shardlib.rules.resolve import Table as RuleTable
from shardlib.sharding.constrain import check_rules
from shardlib.tables import Report, Table

SURE = 0.05
"""Share of a step from which other rules are quicker: both cost models err by a few percent."""


@dataclasses.dataclass(frozen=True)
class Price:
    """The cost of a step under some rules: of the program that a device runs if shardlib partitions
    it, otherwise by the cost model of traced programs."""

    name: str
    seconds: float
    memory_bytes: float
    """Bytes that one device holds at the peak."""
    unhidden_seconds: float | None = None
    """Of a step that hides no communication; None if XLA partitions it."""

    @property
    def rank(self) -> float:
        """Seconds by which rules on one mesh are compared. What a compiler hides is least sure."""
        return self.seconds if self.unhidden_seconds is None else self.unhidden_seconds


Compare = Callable[[str, AxisRules, Mapping[str, int]], tuple[Price, Mapping[str, str]]]
"""Returns the price of rules on a mesh, and the mesh axes of each parameter as text."""


@dataclasses.dataclass(frozen=True)
class FoundRules(Report):
    """Rules found for a model on a mesh."""

    sizes: Mapping[str, int]
    """Devices along each mesh axis."""
    cluster: str
    rules: AxisRules
    classes: Classes
    names: Mapping[int, tuple[str | None, ...]]
    """The names of the dims of each tensor class."""
    solution: Solution
    prices: tuple[Price, ...]
    """The prices of these rules, of others that were priced with them, such as `zero1`, and of
    `fsdp` alone where it can cut the batch evenly."""
    capacity_bytes: float
    traffic: Traffic
    """Bytes that a device sends in a step, by kind and mesh axes."""
    questions: Questions = dataclasses.field(repr=False, compare=False)
    """What other rules would cost."""
    compare: Compare = dataclasses.field(repr=False, compare=False)
    remat: str | None = None
    """The rematerialisation, by its name in `make`; None if `make` has only one."""
    binds: str = ""
    """What keeps a step from being quicker; see `priced`."""
    saved: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    """Seconds by which a step without a rule is slower, such as `params.up`; see `priced`."""
    differences: tuple[tuple[str, str, str], ...] = ()
    """Parameters that other rules place otherwise; see `compared_with`."""
    late: tuple[str, ...] = ()
    """Meshes for which nothing was found in time."""

    def why_not(self, rule: str) -> WhyNotRule:
        """Returns what another rule would cost, such as `up: fsdp`, `up: data+fsdp` or `up: null`.

        A rule is for parameters, or with `activations.up: tensor` for activations. The integer
        program is solved again with it; all other rules may change.

        Raises:
            RuleError: If the text is not a rule, or names an unknown axis.
        """
        return self.questions.why_not(rule)

    def priced(self) -> "FoundRules":
        """Returns the same rules with what binds, and with the price of leaving out each of them.

        The integer program is solved again without the rule; all other rules may change.
        """
        saved = {
            f"{table}.{name}": self.questions.saved_seconds(table, name)
            for table in get_args(Kind)
            for name, alternatives in self.rules.table(table)
            if any(alternatives) and not self.questions.fixed(table, name)
        }
        return dataclasses.replace(self, binds=self.questions.binding(), saved=saved)

    def compared_with(self, rules: AxisRules, name: str = "other rules") -> "FoundRules":
        """Returns the same rules with the price of other rules on their mesh, and the parameters
        that the others place otherwise.

        Raises:
            RuleError: If the other rules cannot place a parameter.
        """
        check_rules(rules)
        price, others = self.compare(name, rules, self.sizes)
        _, own = self.compare("", self.rules, self.sizes)
        rows = by_pattern({path: (at, others[path]) for path, at in own.items()})
        differences = tuple((path, *row) for path, row in rows.items() if row[0] != row[1])
        prices = (*self.prices, price)
        return dataclasses.replace(self, prices=prices, differences=differences)

    @property
    def mesh(self) -> Mesh:
        """The mesh over the devices at hand.

        Raises:
            MeshError: If there are too few.
        """
        return make_mesh(self.mesh_text)

    @property
    def mesh_text(self) -> str:
        """The mesh as text, such as `fsdp=4,tensor=2`."""
        return ",".join(f"{axis}={n}" for axis, n in self.sizes.items() if n > 1) or "data=1"

    @property
    def microbatches(self) -> int:
        """Parts of a batch that run one after the other."""
        return self.questions.problem.objective.microbatches

    @property
    def idle(self) -> dict[str, int]:
        """The mesh axes that no rule names, with their sizes: their devices compute the same."""
        mesh = abstract_mesh(self.mesh_text, math.prod(self.sizes.values()))
        return self.rules.idle(mesh)

    @property
    def step_text(self) -> str:
        """The mesh, microbatches and rematerialisation as text: `fsdp=8, 2 microbatches, remat
        full`."""
        parts = f", {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return self.mesh_text + parts + ("" if self.remat is None else f", remat {self.remat}")

    @property
    def seconds(self) -> float:
        """Seconds of a step by the integer program, without the cost of rules."""
        return self.solution.seconds - self.solution.seconds_by_part["rules"]

    def html(self) -> str:
        """Returns the report as one HTML page that works offline."""
        title, *parts = self.parts()
        shown = [f"<h1>{html.escape(title)}</h1>"]
        for part in parts:
            is_text = isinstance(part, str)
            shown.append(f"<p>{html.escape(part)}</p>" if is_text else part.html())
        return document(title, shown)

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data for JSON.

        - `cluster`, `mesh` (as text), `microbatches`, `remat` (None if `make` has only one), `late`
          (meshes for which nothing was found in time), `seconds` (of a step by the integer
          program), `bound_seconds` (none of its kind is quicker), `gap`, `seconds_by_part`,
          `memory_bytes` (of state and saved activations), `capacity_bytes`, and `idle`: the sizes
          of mesh axes that no rule names.
        - `rules`: the section `rules` of a config. `fingerprint`: that of the analysis, None if the
          model names its activations itself.
        - `prices`: `name`, `seconds`, `unhidden_seconds`, `memory_bytes` by the cost model; these
          rules come first.
        - `traffic`: `collective`, `axes` and the `bytes` that a device sends in a step.
        - `binds` and `saved`, from `priced`: seconds by rule, None if nothing else can be.
        - `differences`, from `compared_with`: a pattern of paths, its mesh axes, and the others.
        """
        solution, names = self.solution, self.rules.names
        return {
            "cluster": self.cluster,
            "mesh": self.mesh_text,
            "microbatches": self.microbatches,
            "remat": self.remat,
            "late": list(self.late),
            "seconds": self.seconds,
            "bound_seconds": solution.bound_seconds,
            "gap": solution.gap,
            "seconds_by_part": dict(solution.seconds_by_part),
            "memory_bytes": solution.memory_bytes,
            "capacity_bytes": self.capacity_bytes,
            "idle": self.idle,
            "rules": to_dict(RulesConfig.of(self.rules)),
            "fingerprint": names and names.fingerprint,
            "prices": [dataclasses.asdict(price) for price in self.prices],
            "traffic": [
                {"collective": kind, "axes": list(axes), "bytes": sent}
                for (kind, axes), sent in self.traffic.items()
            ],
            "binds": self.binds,
            "saved": dict(self.saved),
            "differences": [list(row) for row in self.differences],
        }

    def parts(self) -> Iterator[Any]:
        """Yields the lines and tables of the report."""
        solution = self.solution
        price = self.prices[0]
        yield (
            f"rules found for {self.step_text} on {self.cluster}: "
            f"{duration(price.seconds)} a step by the cost model, "
            f"{size(price.memory_bytes)} of {size(self.capacity_bytes)} on a device"
        )
        for axis, count in self.idle.items():
            yield f"no rule names {axis}={count}: these {count} devices compute the same"
        spent = solution.seconds_by_part
        kind = "" if price.name.startswith("found,") else " for answers of this kind"
        yield (
            f"the integer program, a simpler model, counts {duration(self.seconds)}, within "
            f"{solution.gap:.1%} of the least that it allows{kind}: "
        ) + ", ".join(
            f"{duration(spent[part])} of {words}" for part, words in PARTS.items() if spent[part]
        )
        if self.binds:
            yield self.binds
        if self.late:
            yield f"nothing was found in time for {', '.join(self.late)}"
        yield from self._zero()
        columns = ("logical axis", "size>", *self._tables, "parameters")
        notes = [f"not cut: {', '.join(whole)}"] if (whole := self._whole()) else []
        yield Table("rules", columns, list(self._rule_rows()), notes)
        rows = [(pattern, ", ".join(map(str, axes))) for pattern, axes in self.rules.paths]
        if rows:
            yield Table("axes of parameters", ("path", "logical axes"), rows)
        yield from self._other_rules()
        columns = ("rules", "step>", "nothing hidden>", "memory>")
        rows = [*self._price_rows()]
        yield Table("a step by the cost model", columns, rows, [*self._price_notes()])

    def _price_rows(self) -> Iterator[tuple[str, ...]]:
        """Yields a row for each step; rules that cost the same share one."""
        names: dict[tuple[str, ...], list[str]] = {}
        for price in self.prices:
            unhidden = price.unhidden_seconds
            shown = "-" if unhidden is None else duration(unhidden)
            row = duration(price.seconds), shown, size(price.memory_bytes)
            names.setdefault(row, []).append(price.name)
        for row, alike in names.items():
            yield "; ".join(dict.fromkeys(alike)), *row

    def _price_notes(self) -> Iterator[str]:
        chosen, best = self.prices[0], self._quickest()
        if len(self.prices) > 1:
            yield "the first row is what was found"
        if best.rank < chosen.rank:
            by = "" if best.unhidden_seconds is None else " with nothing hidden"
            less = 1 - best.rank / chosen.rank
            sure = "" if less > SURE else f", and the cost model is sure of {SURE:.0%}"
            yield f"{best.name} is {less:.1%} quicker{by}{sure}"

    def _zero(self) -> Iterator[str]:
        """Yields the stage of ZeRO if the optimizer state is in more parts than the parameters."""
        rules = self.rules
        if rules.opt_state is not None:
            stage = 1 if rules.gradients is None else 2
            what = {1: "optimizer state is", 2: "gradients and optimizer state are"}[stage]
            yield f"the {what} in more parts than the parameters (ZeRO stage {stage})"

    @functools.cached_property
    def _tables(self) -> dict[str, RuleTable]:
        """The tables of rules by what they place."""
        tables = {"params": self.rules.params, "activations": self.rules.activations}
        for section in ("gradients", "opt_state"):
            if (own := getattr(self.rules, section)) is not None:
                tables[section] = own.params
        return tables

    def _other_rules(self) -> Iterator[Table]:
        whole = self.solution.seconds
        if self.saved:
            rows = [
                (rule, "-" if seconds is None else f"{duration(seconds)} ({seconds / whole:.1%})")
                for rule, seconds in self.saved.items()
            ]
            notes = ["-: given, or nothing else fits"] if None in self.saved.values() else []
            yield Table("a step without a rule", ("rule", "slower by>"), rows, notes)
        if self.differences:
            columns = ("parameters", "found", self.prices[-1].name)
            yield Table("parameters that other rules place otherwise", columns, self.differences)

    def _quickest(self) -> Price:
        fitting = [p for p in self.prices if p.memory_bytes <= self.capacity_bytes]
        return min(fitting or self.prices, key=lambda price: price.rank)

    def _rule_rows(self) -> Iterator[tuple[str, ...]]:
        """Yields a row for each name with a rule that cuts."""
        tables = [dict(table) for table in self._tables.values()]
        for name in dict.fromkeys(name for table in tables for name in table):
            cuts = [_joined(table.get(name)) for table in tables]
            if any(cuts):
                patterns = [path for path, axes in self.rules.paths if name in axes]
                # `attend` asks for `kv_heads` by name, which may be no axis of a tensor.
                number = str(self._sizes.get(name, "-"))
                yield name, number, *(cut or "-" for cut in cuts), _some(patterns)

    def _whole(self) -> list[str]:
        cut = {
            name
            for table in self._tables.values()
            for name, alternatives in table
            if any(alternatives)
        }
        return [name for name in self._sizes if name not in cut]

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """The size of each named axis, as parameters have it if they do."""
        tensors = self.classes.tensors
        numbers = sorted(self.names, key=lambda number: tensors[number].kind == "param")
        return {
            name: length
            for number in numbers
            for name, length in zip(self.names[number], tensors[number].shape, strict=True)
            if name is not None
        }


_MAX_PATTERNS = 4


def _joined(alternatives: Sequence[tuple[str, ...]] | None) -> str:
    return "+".join(alternatives[0]) if alternatives else ""


def _some(patterns: Sequence[str]) -> str:
    left = len(patterns) - _MAX_PATTERNS
    more = [f"and {left} more"] if left > 0 else []
    return ", ".join([*patterns[:_MAX_PATTERNS], *more])
