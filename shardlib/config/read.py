"""Loading of configs: a reader fills configclasses from a tree of located values, and collects
every fault."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from shardlib.config import describe, tree
from shardlib.config.classes import (
    Hint,
    Variants,
    choices,
    faults_of_fields,
    fields_of,
    import_path_of,
    is_section,
    mapping_of,
    options,
    sequence_of,
    variants_of,
)
from shardlib.config.tree import Item, Plain, join
from shardlib.errors import ConfigError, ShardlibError, did_you_mean
from shardlib.import_paths import is_import_path

FAILED = object()

T = TypeVar("T")


def load(
    cls: type[T], path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> T:
    """Returns a config read from a YAML file, with `key.path=value` overrides on top.

    Args:
        cls: The configclass to fill.
        path: The YAML file; None uses only the defaults and the overrides.
        overrides: Applied in order. A value in `[]`, `{}` or quotes is YAML; any other value is
            text that the type of its field parses.

    Raises:
        ConfigError: If the file or the overrides have faults; the message lists each on a line.
    """
    root, faults = (Item({}, tree.COMMAND_LINE), []) if path is None else tree.read_file(path)
    faults += tree.apply_overrides(root, overrides, getattr(cls, "named", None))
    return _filled(cls, root, faults)


def from_dict(cls: type[T], data: Mapping[str, Any], source: str) -> T:
    """Returns a config from plain data, such as the result of `to_dict`.

    Args:
        cls: The configclass to fill.
        data: Its keys and values.
        source: Name of the data in messages.

    Raises:
        ConfigError: If the data has faults; the message lists each on a line.
    """
    root = tree.from_python(data, source)
    tree.apply_overrides(root, (), getattr(cls, "named", None))
    return _filled(cls, root, [])


def from_yaml(text: str, name: str) -> Any:
    """Returns the plain data of a YAML document other than a config, with the same safety checks.

    Args:
        text: One YAML document.
        name: Name of the document in messages.

    Raises:
        ConfigError: If the text is not one YAML document, has a duplicate key or a tag, or exceeds
            the size limits of a config.
    """
    root, faults = tree.parse(text, name)
    if faults:
        raise ConfigError("\n".join(faults))
    return tree.natural(root)


def _filled(cls: type[T], root: Item, faults: list[str]) -> T:
    reader = Reader(cls, faults)
    reader.add_implied(root)
    config = reader.read(cls, root, "")
    if not faults:
        assert config is not FAILED
        return config
    reader.check_paths()
    if len(faults) == 1:
        raise ConfigError(faults[0])
    lines = (fault.replace("\n", "\n  ") for fault in faults)
    raise ConfigError("\n  ".join([f"the configuration has {len(faults)} faults:", *lines]))


@dataclasses.dataclass
class Reader:
    """Reads one tree; after `read`, `faults` holds a line for each fault."""

    root: type
    faults: list[str] = dataclasses.field(default_factory=list)
    sections: list[tuple[Any, Item, str]] = dataclasses.field(default_factory=list)
    """The sections without faults, each with its item and its path."""

    def add_implied(self, item: Item) -> None:
        """Adds the values that the method `implied` of the root derives from the given ones.

        The keys that `named` of the root lists have then served, and are removed.
        """
        given = tree.natural(item)
        if not isinstance(given, Mapping):
            return
        try:
            implied = getattr(self.root, "implied", lambda given: {})(given)
            tree.fill(item, implied, item.where)
        except ShardlibError as error:
            self.of_class(str(error), item, "")
        for section, key in getattr(self.root, "named", {}).items():
            held = item.value[section].value if section in item.value else None
            if isinstance(held, dict):
                held.pop(key, None)

    def read(self, hint: Hint, item: Item, path: str) -> Any:
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
                self.sections += attempt.sections
                return value
            attempts.append(attempt)
        nearest = min(attempts, key=lambda attempt: len(attempt.faults))
        self.faults += nearest.faults
        self.sections += nearest.sections
        return FAILED

    def structure(self, option: Hint, item: Item, path: str) -> Any:
        """Returns the value of a mapping or a list for one member of a union."""
        if option is Any:
            return tree.natural(item)
        if is_section(option):
            return self.section(option, item, path)
        if marker := variants_of(option):
            return self.variant(marker, item, path)
        if items := sequence_of(option):
            return self.sequence(option, items, item, path)
        return self.mapping(mapping_of(option) or (str, Any), item, path)

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
        right = {name: value for name, value in values.items() if value is not FAILED}
        if len(right) < len(values):
            self.of_class("\n".join(faults_of_fields(cls, right)), item, path)
            return FAILED
        try:
            section = cls(**values)
        except (ValueError, ShardlibError) as error:
            self.of_class(str(error), item, path)
            return FAILED
        self.sections.append((section, item, path))
        return section

    def check_paths(self) -> None:
        """Reports what the method `check_paths` of each section without faults raises."""
        for section, item, path in self.sections:
            try:
                getattr(section, "check_paths", lambda: None)()
            except ShardlibError as error:
                messages = re.split(r"\n(?! )", str(error))
                self.of_class("\n".join(m.removeprefix(f"{path}.") for m in messages), item, path)

    def of_class(self, messages: str, item: Item, path: str) -> None:
        """Reports the faults that a class finds in its values, each on a line of its own."""
        for message in re.split(r"\n(?! )", messages) if messages else ():
            self.at_key(message, item, path)

    def at_key(self, message: str, item: Item, path: str) -> None:
        """Reports a fault at the key that its message begins with, such as `a` or `a.b`, if any."""
        word = re.split(r"\W", message, maxsplit=1)[0]
        child, below = item.value.get(word), message.removeprefix(f"{word}.")
        if child is None:
            self.fail(item, path, message)
        elif below != message and isinstance(child.value, dict):
            self.at_key(below, child, join(path, word))
        else:
            self.fail(child, join(path, word), message.removeprefix(f"{word}: "))

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

    def sequence(self, hint: Hint, items: tuple[Hint, ...], item: Item, path: str) -> Any:
        if items[-1] is Ellipsis:
            items = items[:1] * len(item.value)
        elif len(items) != len(item.value):
            return self.wrong(hint, item, path)
        values = [
            self.read(member, child, join(path, index))
            for index, (member, child) in enumerate(zip(items, item.value, strict=True))
        ]
        if FAILED in values:
            return FAILED
        return tuple(values) if (typing.get_origin(hint) or hint) is tuple else values

    def mapping(self, hints: tuple[Hint, Hint], item: Item, path: str) -> Any:
        values = {}
        for key, child in item.value.items():
            read_key = self.read(hints[0], Item(Plain(key), child.where), join(path, key))
            values[read_key] = self.read(hints[1], child, join(path, key))
        return FAILED if FAILED in values or FAILED in values.values() else values

    def scalar(self, hint: Hint, item: Item, path: str) -> Any:
        members = options(hint)
        for option in members:
            for choice in choices(option):
                if _is_choice(item.value, choice):
                    return choice
        if is_import_path(item.value) and any(map(import_path_of, members)):
            return str(item.value)
        read = _plain if isinstance(item.value, Plain) else _typed
        value = read(item.value, members)
        return self.wrong(hint, item, path) if value is FAILED else value

    def wrong(self, hint: Hint, item: Item, path: str) -> Any:
        shown = describe.shown(item.value)
        known = [value for option in options(hint) for value in choices(option)]
        names = [value for value in known if isinstance(value, str)]
        near = did_you_mean(str(item.value), names) if isinstance(item.value, str) else ""
        if known and all(choices(option) or import_path_of(option) for option in options(hint)):
            return self.fail(item, path, f"{shown} is not one of {describe.quoted(known)}.{near}")
        for marker in filter(None, map(variants_of, options(hint))):
            if isinstance(item.value, str):
                known, key = list(marker.classes()), join(path, marker.key)
                near = f" Write its keys, as in {key}={known[0]}."
                near = f" Write {key}={item.value}." if item.value in known else near
        return self.fail(item, path, f"expected {describe.expected(hint)}, got {shown}.{near}")

    def fail(self, item: Item, path: str, message: str) -> Any:
        self.faults.append(item.fault(path, message))
        return FAILED


def _fits(option: Hint, value: object) -> bool:
    """Whether a type accepts `value`, if that is a mapping or a list."""
    if isinstance(value, dict):
        return option is Any or bool(
            is_section(option) or variants_of(option) or mapping_of(option)
        )
    return isinstance(value, list) and (option is Any or sequence_of(option) is not None)


def _is_choice(value: object, choice: object) -> bool:
    if not isinstance(value, Plain) or isinstance(choice, str):
        return type(value) in (type(choice), Plain) and value == choice
    if choice is None:
        return tree.as_null(value)
    read = tree.as_bool if isinstance(choice, bool) else tree.as_integer
    return read(value) is choice if isinstance(choice, bool) else read(value) == choice


def _plain(text: str, members: list[Hint]) -> Any:
    """Returns the value of an unquoted scalar for a union, or `FAILED`."""
    is_optional = type(None) in members
    if is_optional and tree.as_null(text):
        return None
    if bool in members and (flag := tree.as_bool(text)) is not None:
        return flag
    if int in members and (integer := tree.as_integer(text)) is not None:
        return integer
    number = tree.as_number(text)
    if float in members and number is not None:
        return number
    if int in members and float not in members and number is not None and number.is_integer():
        return int(number)  # steps=1e4
    if Any in members:
        return tree.natural_scalar(text)
    if str in members:
        return str(text)
    return None if is_optional and text in ("none", "None") else FAILED


def _typed(value: object, members: list[Hint]) -> Any:
    """Returns the value of a quoted or a Python scalar for a union, or `FAILED`."""
    if type(value) in members or Any in members:
        return value
    return float(value) if type(value) is int and float in members else FAILED
