"""Tables of rules from logical axes to mesh axes."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from shardlib.errors import RuleError
from shardlib.mesh import mesh_sizes
from shardlib.rules.analysis import ActivationNames
from shardlib.rules.resolve import (
    Alternative,
    Auto,
    Kind,
    Resolution,
    Section,
    Table,
    mesh_axes_of,
    resolve,
    unknown_mesh_axes,
)


def _alternative(value: object, where: str) -> Alternative:
    if value is None:
        return ()
    names = value.split("+") if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(n, str) and n for n in names):
        raise RuleError(
            f"{where} is {value!r}, which is not a mesh axis.\n"
            "  Give a name ('fsdp'), a product ('data+fsdp'), None, or a list of these."
        )
    names = tuple(name.strip() for name in names)
    if len(set(names)) != len(names):
        raise RuleError(f"{where} is {value!r}, which names a mesh axis twice.\n  Name it once.")
    return names


def _table(rules: Mapping[str, Any] | Table, kind: Kind) -> Table:
    items = rules.items() if isinstance(rules, Mapping) else rules
    table = []
    for axis, value in items:
        where = f"the rule for {axis!r} ({kind})"
        is_list = isinstance(value, list) or (
            isinstance(value, tuple) and any(not isinstance(v, str) for v in value)
        )
        if is_list and not value:
            raise RuleError(f"{where} has no alternatives.\n  Use None to replicate.")
        alternatives = value if is_list else [value]
        table.append((axis, tuple(_alternative(a, where) for a in alternatives)))
    return tuple(table)


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """The placement of every parameter and activation, by the names of its logical axes.

    Args:
        params: Rules for parameters, and so for gradients and optimizer state.
        activations: Rules for activations and for the batch.
        paths: Logical axes of parameters by a pattern over their path (`*` stays within a segment,
            `**` crosses segments). The first match wins and overrides the model's own axes. An
            empty tuple of axes replicates.
        auto: The placement of a parameter without logical axes that matches no path. `None` makes
            such a parameter an error.
        gradients: Rules for gradients, by their `params` table; `None` for the parameters' rules.
        opt_state: Rules for optimizer state, by their `params` table; `None` for the parameters'
            rules. With `gradients` they make the stages of ZeRO.
        names: The logical axes of activations, for a model that names none; see `find_rules`.

    Raises:
        RuleError: If a rule does not have a form that the module describes.
    """

    params: PyTree
    activations: Any
    paths: Any = ()
    auto: Auto | None = None
    gradients: "AxisRules | None" = None
    opt_state: "AxisRules | None" = None
    names: ActivationNames | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", _table(self.params, "params"))
        object.__setattr__(self, "activations", _table(self.activations, "activations"))
        paths = self.paths.items() if isinstance(self.paths, Mapping) else self.paths
        object.__setattr__(self, "paths", tuple((p, tuple(axes)) for p, axes in paths))
        parts = (self.params, self.activations, self.paths, self.auto)
        object.__setattr__(
            self, "_hash", hash((*parts, self.gradients, self.opt_state, self.names))
        )

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def of(self, section: Section) -> "AxisRules":
        """Returns the rules for parameters, for gradients or for optimizer state."""
        own = None if section == "params" else getattr(self, section)
        return own or self

    def table(self, kind: Kind) -> Table:
        """Returns one table in normal form."""
        return self.params if kind == "params" else self.activations

    def override(
        self,
        params: Mapping[str, Any] | None = None,
        activations: Mapping[str, Any] | None = None,
        paths: Mapping[str, Iterable[str | None]] | None = None,
        **param_rules: Any,
    ) -> "AxisRules":
        """Returns rules with some of them replaced, or new ones added at the end.

        Keywords are parameter rules: `rules.override(embed=None)` is
        `rules.override(params={"embed": None})`. New `paths` are tried before the present ones.
        Rules of `gradients` and `opt_state` that equal the parameter's old rule change with it.
        """
        changes = {**(params or {}), **param_rules}
        return self._changed(
            _table(changes, "params"),
            _table(activations or {}, "activations"),
            tuple((paths or {}).items()),
        )

    def _changed(self, params: Table, activations: Table, paths: tuple[Any, ...]) -> "AxisRules":
        old = dict(self.params)

        def nested(rules: "AxisRules | None") -> "AxisRules | None":
            if rules is None:
                return None
            own = dict(rules.params)
            same = tuple((axis, new) for axis, new in params if own.get(axis) == old.get(axis))
            return rules._changed(same, activations, paths)

        return dataclasses.replace(
            self,
            params=tuple((old | dict(params)).items()),
            activations=tuple((dict(self.activations) | dict(activations)).items()),
            paths=(*paths, *self.paths),
            gradients=nested(self.gradients),
            opt_state=nested(self.opt_state),
        )

    def at_other_sizes(self) -> "AxisRules":
        """Returns found rules for models that differ in the sizes of their parameters alone, as a
        small one for a test does."""
        names = self.names and self.names.without_sizes()
        return dataclasses.replace(self, names=names)

    def check(self, mesh: Mesh | AbstractMesh) -> None:
        """Raises `RuleError` if a rule names a mesh axis that is neither in the mesh nor standard;
        lists all such names."""
        names = tuple(mesh_sizes(mesh))
        faults = dict.fromkeys(f for r in self._sections for f in unknown_mesh_axes(r, names))
        if faults:
            raise RuleError("\n".join(faults))

    def idle(self, mesh: Mesh | AbstractMesh) -> dict[str, int]:
        """Returns the mesh axes with more than one device that no rule names, with their sizes.

        Devices along them hold and compute the same values, unless code splits them manually.
        """
        named = set[str]().union(*(mesh_axes_of(rules) for rules in self._sections))
        return {n: size for n, size in mesh_sizes(mesh).items() if size > 1 and n not in named}

    @property
    def _sections(self) -> list["AxisRules"]:
        sections: tuple[Section, ...] = ("params", "gradients", "opt_state")
        return [*dict.fromkeys(self.of(section) for section in sections)]

    def resolve(
        self,
        logical_axes: Sequence[str | None],
        shape: Sequence[int],
        mesh: Mesh | AbstractMesh | Mapping[str, int],
        kind: Kind = "params",
    ) -> Resolution:
        """Places one tensor.

        Args:
            logical_axes: One name, or `None` (replicated), for each dim.
            shape: The dims of the tensor.
            mesh: A `Mesh` or `AbstractMesh`, or a mapping from mesh axis to size.
            kind: The table of rules.

        Returns:
            The spec with a record of each choice; `faults` lists the rules that cannot be met.
        """
        sizes = mesh if isinstance(mesh, Mapping) else mesh_sizes(mesh)
        return resolve(self, kind, tuple(logical_axes), tuple(shape), tuple(sizes.items()))

    def spec(
        self,
        logical_axes: Sequence[str | None],
        shape: Sequence[int],
        mesh: Mesh | AbstractMesh | Mapping[str, int],
        kind: Kind = "params",
    ) -> PartitionSpec:
        """Returns the spec of one tensor.

        Raises:
            RuleError: If the tensor cannot be placed; the message lists every fault.
        """
        resolution = self.resolve(logical_axes, shape, mesh, kind)
        if resolution.faults:
            raise RuleError("\n".join(resolution.faults))
        return resolution.spec
