"""Descriptions of configs: text for `--help` and messages, and a JSON schema for editors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from shardlib.config import dump
from shardlib.config.classes import (
    ConfigField,
    Hint,
    Variants,
    choices,
    fields_of,
    import_path_of,
    is_section,
    mapping_of,
    options,
    sequence_of,
    variants_of,
)
from shardlib.config.tree import join
from shardlib.errors import without_credentials
from shardlib.import_paths import PATTERN

_TYPES: dict[Hint, tuple[str, str]] = {
    int: ("integer", "integer"),
    float: ("number", "number"),
    str: ("text", "string"),
    bool: ("true or false", "boolean"),
    type(None): ("null", "null"),
}
"""Each scalar type in words and in a JSON schema."""
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


def quoted(values: Iterable[object], separator: str = ", ") -> str:
    """Returns values as written in YAML, with text in quotes."""
    texts = (repr(value) if isinstance(value, str) else dump.inline(value) for value in values)
    return separator.join(texts) or "(none)"


def shown(value: object) -> str:
    """Returns the description of a found value, for a message."""
    if isinstance(value, dict):
        return f"a mapping of {', '.join(map(repr, value))}" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, str):
        text = without_credentials(value)  # Before the cut: no pattern matches half a URL.
        return repr(text if len(text) <= 60 else text[:57] + "...") if text else "nothing"
    return dump.inline(value)


def expected(hint: Hint) -> str:
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


def type_text(hint: Hint) -> str:
    """Returns the type of a field for a table: `integer | null`."""
    return " | ".join(_option_text(option) for option in options(hint))


def _option_text(option: Hint) -> str:
    if option is Any:
        return "anything"
    if option in _TYPES:
        return _TYPES[option][0]
    if values := choices(option):
        return quoted(values, " | ")
    if import_path_of(option):
        return _PATH_TEXT
    if marker := variants_of(option):
        return f"section with the key {marker.key!r}"
    if items := sequence_of(option):
        if items[-1] is Ellipsis:
            return f"list of {_inner_text(items[0])}"
        return f"list of {len(items)}: {', '.join(map(type_text, items))}"
    if pair := mapping_of(option):
        return f"mapping of {_inner_text(pair[0])} to {_inner_text(pair[1])}"
    return "section"


def _inner_text(hint: Hint) -> str:
    """Returns the type of an entry, in parentheses if it is one of several."""
    text = type_text(hint)
    return f"({text})" if " | " in text else text


def keys(cls: type) -> list[Key]:
    """Returns every key of a configclass, including its sections and their variants."""
    return list(_section_keys(cls, "", None, ""))


def _section_keys(cls: type, path: str, instance: object, when: str) -> Iterator[Key]:
    for field in fields_of(cls).values():
        # The default of the section, if there is one, gives the defaults of its fields.
        given = getattr(instance, field.name) if instance is not None else None
        default = field.default() if instance is None and not field.required else given
        required = field.required and instance is None
        yield from _field_keys(field, join(path, field.name), default, required, when)


def _field_keys(
    field: ConfigField, path: str, default: object, required: bool, when: str
) -> Iterator[Key]:
    members = options(field.hint)
    nested = [(path, option) for option in members]
    nested += [(f"{path}[]", item) for option in members for item in sequence_of(option) or ()]
    nested = [(at, option) for at, option in nested if is_section(option) or variants_of(option)]
    if len(members) > 1 or not nested or nested[0][0] != path:
        text = "" if required else dump.inline(default)
        yield Key(path, type_text(field.hint), text, field.doc, when)
    instance = default if dataclasses.is_dataclass(default) else None
    for at, option in nested:
        if marker := variants_of(option):
            yield from _variant_keys(marker, at, instance, when, field.doc)
        else:
            same = instance if isinstance(instance, option) else None
            yield from _section_keys(option, at, same, when)


def _variant_keys(
    marker: Variants, path: str, instance: object, when: str, doc: str
) -> Iterator[Key]:
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
    for name, key in getattr(cls, "named", {}).items():  # A text, or the key, names a preset.
        for section in properties[name]["oneOf"]:
            section["properties"][key] = {"type": "string"}
        properties[name]["oneOf"].append({"type": "string"})
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required := [name for name, field in fields_of(cls).items() if field.required]:
        schema["required"] = required
    return schema


def _schema(hint: Hint) -> dict[str, Any]:
    members = options(hint)
    if len(members) > 1:
        return {"anyOf": [_schema(member) for member in members]}
    option = members[0]
    if option is Any:
        return {}
    if option in _TYPES:
        return {"type": _TYPES[option][1]}
    if values := choices(option):
        return {"enum": list(values)}
    if import_path_of(option):
        return {"type": "string", "pattern": PATTERN}
    if marker := variants_of(option):
        schemas = [_variant_schema(marker, *pair) for pair in marker.classes().items()]
        if marker.by_path:  # An editor does not know the keys of the class at a path.
            by_path = {marker.key: {"type": "string", "pattern": PATTERN}}
            schemas.append({"type": "object", "properties": by_path, "required": [marker.key]})
        return {"oneOf": schemas}
    if items := sequence_of(option):
        if items[-1] is Ellipsis:
            return {"type": "array", "items": _schema(items[0])}
        size = {"minItems": len(items), "maxItems": len(items)}
        return {"type": "array", "items": [_schema(item) for item in items], **size}
    if pair := mapping_of(option):
        return {"type": "object", "additionalProperties": _schema(pair[1])}
    return _section_schema(option)


def _variant_schema(marker: Variants, name: str, cls: type) -> dict[str, Any]:
    schema = _section_schema(cls)
    schema["properties"][marker.key]["enum"] = [name]
    if name != marker.default:
        schema["required"] = [*schema.get("required", ()), marker.key]
    return schema
