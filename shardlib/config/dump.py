"""Serialization of configs to plain data, and to YAML that loads back as an equal config."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from shardlib.config import tree

if TYPE_CHECKING:
    import yaml


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


class Change(NamedTuple):
    """A key in which two configs differ; `ABSENT` marks a key that one of them lacks."""

    path: str
    old: Any
    new: Any


def to_dict(value: object) -> Any:
    """Returns a config, or any value in one, as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: to_dict(getattr(value, field.name)) for field in fields if field.init}
    if isinstance(value, Mapping):
        return {str(key): to_dict(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(child) for child in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a config cannot hold {value!r}, which is not plain data")


def to_yaml(config: object) -> str:
    """Returns a config as YAML; `load` reads it back to an equal config."""
    return _dump(to_dict(config))


def inline(value: object) -> str:
    """Returns a value as YAML on one line."""
    return _dump(to_dict(value), flow=True).removesuffix("\n").removesuffix("\n...")


def _dump(value: object, flow: bool = False) -> str:
    import yaml

    return yaml.dump(
        value,
        Dumper=_dumper(),
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=flow,
        width=math.inf if flow else 100,
    )


@functools.cache
def _dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        # Quoted wherever another type could parse it: PyYAML leaves 1e-3 unquoted.
        ambiguous = tree.natural_scalar(text) != text or tree.as_bool(text) is not None
        style = "'" if ambiguous or text.lower() == "none" else None
        style = style if text.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
        nested = any(isinstance(value, dict | list) for value in values)
        flow = None if nested else True
        return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)

    Dumper.add_representer(str, represent_text)
    Dumper.add_representer(list, represent_list)
    return Dumper


def diff(old: object, new: object) -> list[Change]:
    """Returns the differing keys of two configs, or of their plain data, by path."""
    return _diff(to_dict(old), to_dict(new), "")


def _diff(old: object, new: object, path: str) -> list[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in [*old, *(key for key in new if key not in old)]:
            at = tree.join(path, key)
            changes += _diff(old.get(key, ABSENT), new.get(key, ABSENT), at)
        return changes
    same = old == new or (old != old and new != new)
    return [] if same else [Change(path, old, new)]
