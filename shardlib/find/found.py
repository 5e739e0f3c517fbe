"""Found rules, and what they cost."""

import dataclasses
import functools
import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from shardlib.config import to_dict
from shardlib.explain.report.html_page import document
from shardlib.find.classes import Classes
from shardlib.find.problem import Solution
from shardlib.find.program import Part
from shardlib.find.traffic import Traffic
from shardlib.humanize import duration, size
from shardlib.mesh import make_mesh
from shardlib.rules import AxisRules, RulesConfig
from shardlib.tables import Report, Table


@dataclasses.dataclass(frozen=True)
class Price:
    """The cost of a step under some rules, by the cost model of traced programs."""

    name: str
    seconds: float
    memory_bytes: float
    """Bytes that one device holds at the peak."""


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
    """The prices of these rules, and of `fsdp` alone."""
    capacity_bytes: float
    traffic: Traffic
    """Bytes that a device sends in a step, by kind and mesh axes."""

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

        - `cluster`, `mesh` (as text), `seconds` (of a step, by the integer program),
          `bound_seconds` (no choice is quicker), `gap`, `seconds_by_part`, `memory_bytes` (of
          state and saved activations) and `capacity_bytes`.
        - `rules`: the section `rules` of a config. `fingerprint`: that of the analysis, None if the
          model names its activations itself.
        - `prices`: `name`, `seconds` and `memory_bytes` by the cost model of traced programs; these
          rules come first.
        - `traffic`: `collective`, `axes` and the `bytes` that a device sends in a step.
        """
        solution, names = self.solution, self.rules.names
        return {
            "cluster": self.cluster,
            "mesh": self.mesh_text,
            "seconds": self.seconds,
            "bound_seconds": solution.bound_seconds,
            "gap": solution.gap,
            "seconds_by_part": dict(solution.seconds_by_part),
            "memory_bytes": solution.memory_bytes,
            "capacity_bytes": self.capacity_bytes,
            "rules": to_dict(RulesConfig.of(self.rules)),
            "fingerprint": names and names.fingerprint,
            "prices": [dataclasses.asdict(price) for price in self.prices],
            "traffic": [
                {"collective": kind, "axes": list(axes), "bytes": sent}
                for (kind, axes), sent in self.traffic.items()
            ],
        }

    def parts(self) -> Iterator[Any]:
        """Yields the lines and tables of the report."""
        solution = self.solution
        yield (
            f"rules found for {self.mesh_text} on {self.cluster}: {duration(self.seconds)} a step, "
            f"within {solution.gap:.1%} of the least that the integer program allows"
        )
        spent = solution.seconds_by_part
        yield "of these " + ", ".join(
            f"{duration(spent[part])} {words}" for part, words in _PARTS.items() if spent[part]
        )
        yield (
            f"state and saved activations take {size(solution.memory_bytes)} of "
            f"{size(self.capacity_bytes)}"
        )
        columns = ("logical axis", "size>", "params", "activations", "parameters")
        notes = [f"not cut: {', '.join(whole)}"] if (whole := self._whole()) else []
        yield Table("rules", columns, list(self._rule_rows()), notes)
        rows = [(pattern, ", ".join(map(str, axes))) for pattern, axes in self.rules.paths]
        if rows:
            yield Table("axes of parameters", ("path", "logical axes"), rows)
        rows = [(p.name, duration(p.seconds), size(p.memory_bytes)) for p in self.prices]
        notes = [f"{best.name} is quicker"] if (best := self._quickest()) != self.prices[0] else []
        yield Table("a step by the cost model", ("rules", "step>", "memory>"), rows, notes)

    def _quickest(self) -> Price:
        fitting = [p for p in self.prices if p.memory_bytes <= self.capacity_bytes]
        return min(fitting or self.prices, key=lambda price: price.seconds)

    def _rule_rows(self) -> Iterator[tuple[str, ...]]:
        """Yields a row for each name with a rule that cuts."""
        tables = {kind: dict(self.rules.table(kind)) for kind in ("params", "activations")}
        for name in dict.fromkeys([*tables["params"], *tables["activations"]]):
            cuts = [_joined(tables[kind].get(name)) for kind in ("params", "activations")]
            if any(cuts):
                patterns = [path for path, axes in self.rules.paths if name in axes]
                yield name, str(self._sizes[name]), *(cut or "-" for cut in cuts), _some(patterns)

    def _whole(self) -> list[str]:
        cut = {
            name
            for kind in ("params", "activations")
            for name, alternatives in self.rules.table(kind)
            if any(alternatives)
        }
        return [name for name in self._sizes if name not in cut]

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """The size of each named axis."""
        return {
            name: self.classes.axes[axis].size
            for number, names in self.names.items()
            for name, axis in zip(names, self.classes.tensors[number].axes, strict=True)
            if name is not None
        }


_PARTS: Mapping[Part, str] = {
    "products": "of products",
    "parameters": "of exposed gathers and sums of parameters",
    "activations": "of exposed moves of activations",
    "passes": "of passes over memory",
}
_MAX_PATTERNS = 4


def _joined(alternatives: Sequence[tuple[str, ...]] | None) -> str:
    return "+".join(alternatives[0]) if alternatives else ""


def _some(patterns: Sequence[str]) -> str:
    left = len(patterns) - _MAX_PATTERNS
    more = [f"and {left} more"] if left > 0 else []
    return ", ".join([*patterns[:_MAX_PATTERNS], *more])
