"""Serialization of configs to plain data, and to YAML that loads back as an equal config."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardlib.config import tree


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


class Change(NamedTuple):
    """A key in which two configs differ; `ABSENT` marks a key that one of them lacks."""

    path: str
    old: Any
    new: Any


def to_dict(value: Any) -> Any:
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
    import pydantic_core

    return pydantic_core.to_jsonable_python(value)


def to_yaml(config: Any) -> str:
    """Returns a config as YAML; `load` reads it back to an equal config."""
    return _dump(to_dict(config))


def inline(value: Any) -> str:
    """Returns a value as YAML on one line."""
    return _dump(to_dict(value), flow=True).removesuffix("\n").removesuffix("\n...")


def _dump(value: Any, flow: bool = False) -> str:
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
def _dumper() -> Any:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def represent_text(dumper: Any, text: str) -> Any:
        # Quoted wherever another type could parse it: PyYAML leaves 1e-3 unquoted.
        ambiguous = tree.natural_scalar(text) != text or tree.as_bool(text) is not None
        style = "'" if ambiguous or text.lower() == "none" else None
        style = style if text.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def represent_list(dumper: Any, values: list[Any]) -> Any:
        nested = any(isinstance(value, dict | list) for value in values)
        flow = None if nested else True
        return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)

    Dumper.add_representer(str, represent_text)
    Dumper.add_representer(list, represent_list)
    return Dumper


def diff(old: Any, new: Any) -> list[Change]:
    """Returns the differing keys of two configs, or of their plain data, by path."""
    return _diff(to_dict(old), to_dict(new), "")


def _diff(old: Any, new: Any, path: str) -> list[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in [*old, *(key for key in new if key not in old)]:
            at = tree.join(path, key)
            changes += _diff(old.get(key, ABSENT), new.get(key, ABSENT), at)
        return changes
    same = old == new or (old != old and new != new)
    return [] if same else [Change(path, old, new)]
