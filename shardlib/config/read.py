"""Reader that fills configclasses from a tree of located values and collects every fault."""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import types
import typing
from typing import Any

from shardlib.config import describe, tree
from shardlib.config.classes import (
    Variants,
    choices,
    fields_of,
    import_path_of,
    is_section,
    options,
    variants_of,
)
from shardlib.config.tree import Item, Plain, join
from shardlib.errors import ShardlibError, did_you_mean
from shardlib.import_paths import is_import_path

FAILED = object()


@dataclasses.dataclass
class Reader:
    """Reads one tree; after `read`, `faults` holds a line for each fault."""

    root: type
    faults: list[str] = dataclasses.field(default_factory=list)

    def read(self, hint: Any, item: Item, path: str) -> Any:
        """Returns the value of an item for a field of type `hint`, or `FAILED`."""
        fitting = [option for option in options(hint) if _fits(option, item.value)]
        if item.value == "" and isinstance(item.value, Plain):
            sections = [o for o in options(hint) if is_section(o) or variants_of(o)]
            if sections and not fitting:  # `train:` with all of its keys commented out.
                return self.read(sections[0], Item({}, item.where, item.override), path)
        if not isinstance(item.value, dict | list):
            return self.scalar(hint, item, path)
        if not fitting:
            return self.wrong(hint, item, path)
        attempts = []
        for option in fitting:
            attempt = Reader(self.root)
            value = attempt.structure(option, item, path)
            if value is not FAILED:
                return value
            attempts.append(attempt.faults)
        self.faults += min(attempts, key=len)
        return FAILED

    def structure(self, option: Any, item: Item, path: str) -> Any:
        """Returns the value of a mapping or a list for one member of a union."""
        if is_section(option):
            return self.section(option, item, path)
        if marker := variants_of(option):
            return self.variant(marker, item, path)
        if option is Any:
            return tree.natural(item)
        origin = typing.get_origin(option) or option
        if origin in (tuple, list):
            return self.sequence(option, item, path)
        if origin in (dict, collections.abc.Mapping):
            return self.mapping(option, item, path)
        return self.by_pydantic(option, tree.natural(item), item, path)

    def section(self, cls: type, item: Item, path: str, chosen: str = "") -> Any:
        fields = fields_of(cls)
        values = {}
        for key, child in item.value.items():
            if key in fields:
                values[key] = self.read(fields[key].hint, child, join(path, key))
            else:
                values[key] = self.fail(
                    child, join(path, key), self.unknown(key, path, fields, chosen)
                )
        for name, field in fields.items():
            if field.required and name not in item.value:
                message = f"missing required key ({describe.expected(field.hint)})."
                # Missing from the section as a whole, so no single override is to blame.
                values[name] = self.fail(Item(None, item.where), join(path, name), message)
        if FAILED in values.values():
            return FAILED
        try:
            return cls(**values)
        except (ValueError, ShardlibError) as error:
            for fault in re.split(r"\n(?! )", str(error)):
                self.between_fields(fault, item, path)
            return FAILED

    def between_fields(self, message: str, item: Item, path: str) -> None:
        """Reports a fault of `__post_init__`, at the key that its message begins with, if any."""
        word = re.split(r"\W", message, maxsplit=1)[0]
        if word in item.value:
            self.fail(item.value[word], join(path, word), message.removeprefix(f"{word}: "))
        else:
            self.fail(item, path, message)

    def unknown(self, key: str, path: str, fields: typing.Iterable[str], chosen: str) -> str:
        message = f"unknown key of {chosen!r}." if chosen else "unknown key."
        if near := did_you_mean(key, fields):
            return message + near
        # The same path may be a key of another variant.
        paths = {known.path: None for known in describe.keys(self.root)}
        paths.pop(join(path, key), None)
        if elsewhere := [path for path in paths if path.split(".")[-1] == key]:
            return f"{message} Did you mean {elsewhere[0]!r}?"
        return f"{message} The keys here are {', '.join(fields) or 'none'}."

    def variant(self, marker: Variants, item: Item, path: str) -> Any:
        classes = marker.classes()
        known = describe.quoted(classes)
        chooser = item.value.get(marker.key)
        if chooser is None and marker.default is None:
            message = f"missing required key (one of {known})."
            return self.fail(Item(None, item.where), join(path, marker.key), message)
        name = marker.default if chooser is None else chooser.value
        if chooser is not None and marker.takes(name):
            try:
                return self.section(marker.class_at(str(name)), item, path, chosen=str(name))
            except ShardlibError as error:
                return self.fail(chooser, join(path, marker.key), str(error))
        if not isinstance(name, str) or name not in classes:
            shown = describe.shown(name)
            message = f"{shown} is not one of {known}.{did_you_mean(str(name), classes)}"
            if marker.by_path and "." in str(name):
                message += " Name one of your own by its import path, module:name."
            return self.fail(chooser or item, join(path, marker.key), message)
        return self.section(classes[name], item, path, chosen=str(name))

    def sequence(self, hint: Any, item: Item, path: str) -> Any:
        members = typing.get_args(hint) or (Any, ...)
        if typing.get_origin(hint) is tuple and Ellipsis not in members:
            if len(members) != len(item.value):
                return self.wrong(hint, item, path)
        else:
            members = [members[0]] * len(item.value)
        values = [
            self.read(member, child, join(path, index))
            for index, (member, child) in enumerate(zip(members, item.value, strict=True))
        ]
        if FAILED in values:
            return FAILED
        return tuple(values) if (typing.get_origin(hint) or hint) is tuple else values

    def mapping(self, hint: Any, item: Item, path: str) -> Any:
        key_hint, value_hint = typing.get_args(hint) or (str, Any)
        values = {}
        for key, child in item.value.items():
            read_key = self.read(key_hint, Item(Plain(key), child.where), join(path, key))
            values[read_key] = self.read(value_hint, child, join(path, key))
        return FAILED if FAILED in values or FAILED in values.values() else values

    def scalar(self, hint: Any, item: Item, path: str) -> Any:
        members = options(hint)
        for option in members:
            for choice in choices(option):
                if _is_choice(item.value, choice):
                    return choice
        if is_import_path(item.value) and any(map(import_path_of, members)):
            return str(item.value)
        for read in _PLAIN if isinstance(item.value, Plain) else _TYPED:
            value = read(item.value, members)
            if value is not FAILED:
                return value
        for option in members:
            if not _by_us(option):
                return self.by_pydantic(option, item.value, item, path)
        return self.wrong(hint, item, path)

    def by_pydantic(self, hint: Any, value: Any, item: Item, path: str) -> Any:
        """Validates types other than the plain ones: constraints, paths, enums, dates."""
        import pydantic

        if typing.get_origin(hint) is typing.Annotated:
            base = typing.get_args(hint)[0]
            value = self.read(base, item, path) if _by_us(base) else value
            if value is FAILED:
                return FAILED
        try:
            plain = str(value) if isinstance(value, Plain) else value
            return pydantic.TypeAdapter(hint).validate_python(plain)
        except pydantic.ValidationError as error:
            reasons = {fault["msg"].replace("Input ", "") for fault in error.errors()}
            shown = describe.shown(item.value)
            return self.fail(item, path, f"{shown} {', '.join(sorted(reasons))}.")

    def wrong(self, hint: Any, item: Item, path: str) -> Any:
        shown = describe.shown(item.value)
        known = [value for option in options(hint) for value in choices(option)]
        names = [value for value in known if isinstance(value, str)]
        near = did_you_mean(str(item.value), names) if isinstance(item.value, str) else ""
        if known and all(choices(option) or import_path_of(option) for option in options(hint)):
            return self.fail(item, path, f"{shown} is not one of {describe.quoted(known)}.{near}")
        for marker in filter(None, map(variants_of, options(hint))):
            if isinstance(item.value, str) and item.value in marker.classes():
                near = f" Write {join(path, marker.key)}={item.value}."
        return self.fail(item, path, f"expected {describe.expected(hint)}, got {shown}.{near}")

    def fail(self, item: Item, path: str, message: str) -> Any:
        self.faults.append(item.fault(path, message))
        return FAILED


def _by_us(option: Any) -> bool:
    """Whether this module reads a type without pydantic."""
    if option in (Any, type(None), bool, int, float, str) or choices(option):
        return True
    if is_section(option) or variants_of(option) or import_path_of(option):
        return True
    origin = typing.get_origin(option) or option
    if origin in (typing.Union, types.UnionType):
        return all(_by_us(member) for member in options(option))
    return origin in (tuple, list, dict, collections.abc.Mapping)


def _fits(option: Any, value: Any) -> bool:
    """Whether a type accepts `value`, which is a mapping or a list."""
    if not isinstance(value, dict | list):
        return False
    origin = typing.get_origin(option) or option
    if option is Any:
        return True
    if is_section(option) or variants_of(option) or origin in (dict, collections.abc.Mapping):
        return isinstance(value, dict)
    if origin in (tuple, list):
        return isinstance(value, list)
    return not _by_us(option)


def _is_choice(value: Any, choice: Any) -> bool:
    if not isinstance(value, Plain) or isinstance(choice, str):
        return type(value) in (type(choice), Plain) and value == choice
    if choice is None:
        return tree.as_null(value)
    read = tree.as_bool if isinstance(choice, bool) else tree.as_integer
    return read(value) is choice if isinstance(choice, bool) else read(value) == choice


# Readers of an unquoted scalar, in the order in which the members of a union are tried.


def _plain_null(text: str, members: list[Any]) -> Any:
    return None if type(None) in members and tree.as_null(text) else FAILED


def _plain_bool(text: str, members: list[Any]) -> Any:
    value = tree.as_bool(text) if bool in members else None
    return FAILED if value is None else value


def _plain_integer(text: str, members: list[Any]) -> Any:
    if int not in members:
        return FAILED
    value = tree.as_integer(text)
    if value is None and float not in members:  # steps=1e4, where no float is meant
        number = tree.as_number(text)
        value = int(number) if number is not None and number.is_integer() else None
    return FAILED if value is None else value


def _plain_number(text: str, members: list[Any]) -> Any:
    value = tree.as_number(text) if float in members else None
    return FAILED if value is None else value


def _plain_text(text: str, members: list[Any]) -> Any:
    if Any in members:
        return tree.natural_scalar(text)
    return str(text) if str in members else FAILED


def _plain_none(text: str, members: list[Any]) -> Any:
    return None if type(None) in members and text in ("none", "None") else FAILED


def _typed(value: Any, members: list[Any]) -> Any:
    if type(value) in members or Any in members:
        return value
    return float(value) if type(value) is int and float in members else FAILED


_PLAIN = (_plain_null, _plain_bool, _plain_integer, _plain_number, _plain_text, _plain_none)
_TYPED = (_typed,)
