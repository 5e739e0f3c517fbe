"""Descriptions of configs: text for `--help` and messages, and a JSON schema for editors."""

from __future__ import annotations

import collections.abc
import dataclasses
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from shardlib.config import dump
from shardlib.config.classes import (
    ConfigField,
    Variants,
    choices,
    fields_of,
    import_path_of,
    is_section,
    options,
    variants_of,
)
from shardlib.config.tree import join
from shardlib.errors import without_credentials
from shardlib.import_paths import PATTERN

_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    Any: "anything",
}
_PATH_TEXT = "import path (module:name)"


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a config.

    Attributes:
        path: Dotted path; `sources[].weight` is the key `weight` of each entry of `sources`.
        type_text: Type of the key in words.
        default_text: Its default as YAML; empty when the key is required.
        doc: Description of the key.
        when: The choice under which the key exists (`name=resnet`), or empty.
    """

    path: str
    type_text: str
    default_text: str
    doc: str
    when: str = ""

    @property
    def required(self) -> bool:
        return not self.default_text


def quoted(values: Iterable[Any]) -> str:
    """Returns values as written in YAML, with text in quotes."""
    return ", ".join(repr(v) if isinstance(v, str) else dump.inline(v) for v in values) or "(none)"


def shown(value: Any) -> str:
    """Returns the description of a found value, for a message."""
    if isinstance(value, dict):
        return f"a mapping of {', '.join(map(repr, value))}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, str):
        text = without_credentials(value)  # Before the cut: no pattern matches half a URL.
        return repr(text if len(text) <= 60 else text[:57] + "...") if text else "nothing"
    return dump.inline(value)


def expected(hint: Any) -> str:
    """Returns the type of a field for a message: "an integer or null"."""
    words = []
    for option in options(hint):
        word = type_text(option)
        words.append(f"an {word}" if word.startswith(("int", "import")) else word)
        if word.startswith(("number", "list", "mapping", "section")):
            words[-1] = f"a {word}"
        if is_section(option):
            words[-1] = "a section of keys"
    return " or ".join(words)


def type_text(hint: Any) -> str:
    """Returns the type of a field for a table: `integer | null`."""
    return " | ".join(_option_text(option) for option in options(hint))


def _option_text(option: Any) -> str:
    if option in _WORDS:
        return _WORDS[option]
    if values := choices(option):
        return " | ".join(repr(v) if isinstance(v, str) else dump.inline(v) for v in values)
    if is_section(option):
        return "section"
    if import_path_of(option):
        return _PATH_TEXT
    if marker := variants_of(option):
        return f"section with the key {marker.key!r}"
    origin, members = typing.get_origin(option) or option, typing.get_args(option)
    if origin is typing.Annotated:
        return type_text(members[0])
    if origin in (tuple, list):
        if origin is tuple and members and Ellipsis not in members:
            return f"list of {len(members)}: {', '.join(map(type_text, members))}"
        return f"list of {type_text(members[0])}" if members else "list"
    if origin in (dict, collections.abc.Mapping):
        return (
            f"mapping of {type_text(members[0])} to {type_text(members[1])}"
            if members
            else ("mapping")
        )
    return getattr(option, "__name__", str(option)).lower()


def keys(cls: type) -> list[Key]:
    """Returns every key of a configclass, including its sections and their variants."""
    return list(_section_keys(cls, "", None, ""))


def _section_keys(cls: type, path: str, instance: Any, when: str) -> Iterator[Key]:
    for field in fields_of(cls).values():
        default, required = _default(field, instance)
        yield from _field_keys(field, join(path, field.name), default, required, when)


def _default(field: ConfigField, instance: Any) -> tuple[Any, bool]:
    """Returns a field's default, taken from the default of its section if there is one."""
    if instance is not None:
        return getattr(instance, field.name), False
    return (None, True) if field.required else (field.default(), False)


def _field_keys(
    field: ConfigField, path: str, default: Any, required: bool, when: str
) -> Iterator[Key]:
    nested = [(path, option) for option in options(field.hint)]
    for option in options(field.hint):
        if (typing.get_origin(option) or option) in (tuple, list):
            members = typing.get_args(option)
            nested += [(f"{path}[]", member) for member in members if member is not Ellipsis]
    nested = [(at, option) for at, option in nested if is_section(option) or variants_of(option)]
    if len(options(field.hint)) > 1 or not nested or nested[0][0] != path:
        text = "" if required else dump.inline(default)
        yield Key(path, type_text(field.hint), text, field.doc, when)
    for at, option in nested:
        instance = default if dataclasses.is_dataclass(default) else None
        if marker := variants_of(option):
            yield from _variant_keys(marker, at, instance, when, field.doc)
        else:
            same = instance if isinstance(instance, option) else None
            yield from _section_keys(option, at, same, when)


def _variant_keys(marker: Variants, path: str, instance: Any, when: str, doc: str) -> Iterator[Key]:
    classes = marker.classes()
    chosen = getattr(instance, marker.key, marker.default)
    names = " | ".join([*map(repr, classes), *([_PATH_TEXT] if marker.by_path else [])])
    yield Key(join(path, marker.key), names, dump.inline(chosen) if chosen else "", doc, when)
    for name, cls in classes.items():
        same = instance if type(instance) is cls else None
        choice = f"{when}, " * bool(when) + f"{marker.key}={name}"
        for key in _section_keys(cls, path, same, choice):
            if key.path != join(path, marker.key):
                yield key


def json_schema(cls: type) -> dict[str, Any]:
    """Returns a JSON schema of a configclass, in draft 7, which YAML editors support."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_section_schema(cls)}


def _section_schema(cls: type) -> dict[str, Any]:
    properties = {}
    for name, field in fields_of(cls).items():
        properties[name] = _schema(field.hint)
        if field.doc:
            properties[name]["description"] = field.doc
        if not field.required:
            properties[name]["default"] = dump.to_dict(field.default())
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required := [name for name, field in fields_of(cls).items() if field.required]:
        schema["required"] = required
    return schema


def _schema(hint: Any) -> dict[str, Any]:
    members = options(hint)
    if len(members) > 1:
        return {"anyOf": [_schema(member) for member in members]}
    option = members[0]
    if option is Any:
        return {}
    if option in _JSON_TYPES:
        return {"type": _JSON_TYPES[option]}
    if values := choices(option):
        return {"enum": list(values)}
    if is_section(option):
        return _section_schema(option)
    if import_path_of(option):
        return {"type": "string", "pattern": PATTERN}
    if marker := variants_of(option):
        schemas = [_variant_schema(marker, *pair) for pair in marker.classes().items()]
        if marker.by_path:  # An editor does not know the keys of the class at a path.
            by_path = {marker.key: {"type": "string", "pattern": PATTERN}}
            schemas.append({"type": "object", "properties": by_path, "required": [marker.key]})
        return {"oneOf": schemas}
    return _container_schema(option)


_JSON_TYPES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
}


def _variant_schema(marker: Variants, name: str, cls: type) -> dict[str, Any]:
    schema = _section_schema(cls)
    schema["properties"][marker.key]["enum"] = [name]
    if name != marker.default:
        schema["required"] = [*schema.get("required", ()), marker.key]
    return schema


def _container_schema(option: Any) -> dict[str, Any]:
    origin, members = typing.get_origin(option) or option, typing.get_args(option)
    if origin in (tuple, list):
        if origin is tuple and members and Ellipsis not in members:
            items = [_schema(member) for member in members]
            size = len(members)
            return {"type": "array", "items": items, "minItems": size, "maxItems": size}
        return {"type": "array", "items": _schema(members[0] if members else Any)}
    if origin in (dict, collections.abc.Mapping):
        value = _schema(members[1]) if members else {}
        return {"type": "object", "additionalProperties": value}
    import pydantic

    return pydantic.TypeAdapter(option).json_schema()
