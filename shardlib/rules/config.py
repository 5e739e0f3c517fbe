"""Rules as the section `rules` of a config, and as text."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardlib.config import configclass, from_dict
from shardlib.config import from_yaml as data_of
from shardlib.config import to_yaml as text_of
from shardlib.errors import MeshError, RuleError
from shardlib.mesh import MeshConfig
from shardlib.rules.analysis import ActivationNames
from shardlib.rules.presets import preset
from shardlib.rules.resolve import Alternative, Table
from shardlib.rules.table import AxisRules

AxisRule = str | None | tuple[str | None, ...]


@configclass
class NamesConfig:
    """The names of activations of a model that names none, as `find_rules` gives them."""

    inputs: dict[str, tuple[str | None, ...]]
    """Logical axes of the leaves of a batch by path."""
    variants: tuple[tuple[str | None, ...], ...] = ()
    """Axes of activations with a rule of their own for one axis, such as length.2."""
    params: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """The dims of parameters that the rules were found for, such as embed=512, by path pattern."""

    def build(self) -> ActivationNames:
        """Returns the names."""
        inputs, params = tuple(self.inputs.items()), tuple(self.params.items())
        return ActivationNames(inputs, self.variants, params)


@configclass
class RulesConfig:
    """A preset with changes. A rule is a mesh axis, a product (`data+fsdp`), null (replicated), or
    a list of alternatives."""

    preset: str | None = "standard"
    """The rules to start from: data, fsdp, standard, sequence, zero1, zero2 or serve; null for
    none."""
    params: dict[str, AxisRule] = dataclasses.field(default_factory=dict)
    """Rules for parameters, by logical axis."""
    activations: dict[str, AxisRule] = dataclasses.field(default_factory=dict)
    """Rules for activations, by logical axis."""
    gradients: dict[str, AxisRule] | None = None
    """Rules for gradients where they differ from `params`; null for the preset's."""
    opt_state: dict[str, AxisRule] | None = None
    """Rules for optimizer state where they differ from `params`; null for the preset's."""
    paths: dict[str, tuple[str | None, ...]] = dataclasses.field(default_factory=dict)
    """Logical axes of parameters by path pattern; they replace the axes in the model's metadata."""
    names: NamesConfig | None = None
    """The names of activations, for a model that names none."""
    found_for: str | None = None
    """The mesh that the rules were found for; a run keeps them on it, and finds new ones for
    another mesh."""

    def __post_init__(self) -> None:
        try:
            self.build()
        except RuleError as error:
            raise ValueError(str(error)) from None
        if self.found_for:
            try:
                MeshConfig.parse(self.found_for)
            except MeshError as error:
                raise ValueError(f"found_for: {error}") from None

    def build(self) -> AxisRules:
        """Returns the rules; raises `RuleError` when they are malformed."""
        start = AxisRules({}, {}) if self.preset is None else preset(self.preset)
        rules = start.override(_read(self.params), _read(self.activations), self.paths)
        plain = dataclasses.replace(rules, gradients=None, opt_state=None)
        sections = {
            section: plain.override(_read(table))
            for section, table in (("gradients", self.gradients), ("opt_state", self.opt_state))
            if table is not None
        }
        names = self.names and self.names.build()
        return dataclasses.replace(rules, names=names, **sections)

    @classmethod
    def of(cls, rules: AxisRules) -> "RulesConfig":
        """Returns rules as a config without a preset.

        Raises:
            RuleError: If they place parameters without axes (`auto`), which only presets do.
        """
        paths: dict[str, tuple[str | None, ...]] = {}
        for pattern, axes in rules.paths:
            paths.setdefault(pattern, axes)  # The first match decides.
        config = cls(
            preset=None,
            params=_written(rules.params),
            activations=_written(rules.activations),
            gradients=_other(rules, rules.gradients),
            opt_state=_other(rules, rules.opt_state),
            paths=paths,
            names=_names(rules.names),
        )
        if config.build() != dataclasses.replace(rules, paths=paths):
            raise RuleError(
                "rules that place parameters without axes (`auto`) have no table of their own.\n"
                "  Name the preset that they change: rules: {preset: standard, params: {...}}."
            )
        return config


def to_yaml(rules: AxisRules) -> str:
    """Returns rules as YAML, as the section `rules` of a config holds them.

    Raises:
        RuleError: If they place parameters without axes (`auto`).
    """
    return text_of(RulesConfig.of(rules))


def from_yaml(text: str) -> AxisRules:
    """Returns the rules of a section `rules`, as YAML or JSON.

    Raises:
        ConfigError: If the text has faults; the message lists all of them.
    """
    return from_dict(RulesConfig, data_of(text, "rules"), "rules").build()


def _names(names: ActivationNames | None) -> NamesConfig | None:
    if names is None:
        return None
    inputs, params = dict(names.inputs), dict(names.params)
    return NamesConfig(inputs=inputs, variants=names.variants, params=params)


def _read(table: Mapping[str, AxisRule]) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in table.items()}


def _other(rules: AxisRules, section: AxisRules | None) -> dict[str, AxisRule] | None:
    """Returns the rules of a section that differ from those for parameters."""
    if section is None:
        return None
    return _written(tuple(rule for rule in section.params if rule not in rules.params))


def _written(table: Table) -> dict[str, AxisRule]:
    def text(alternative: Alternative) -> str | None:
        return "+".join(alternative) or None

    return {
        axis: text(options[0]) if len(options) == 1 else tuple(map(text, options))
        for axis, options in table
    }
