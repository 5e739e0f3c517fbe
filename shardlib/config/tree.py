"""Tree of YAML and overrides in which every value knows its source location. The size of a document
is checked before its aliases are expanded."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardlib.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import yaml

COMMAND_LINE = "command line"

_MOST_BYTES = 1 << 18
"""Largest file size. PyYAML takes some seconds for it."""
_MOST_VALUES = 10_000
"""Most values and keys with aliases expanded: a hundred bytes of YAML can expand to gigabytes."""
_MOST_DEPTH = 64
"""Deepest nesting of values, far below the limit of Python's stack."""

_TAGS = ("null", "bool", "int", "float", "str", "timestamp", "seq", "map", "merge", "value")


class Plain(str):
    """An unquoted scalar, whose meaning depends on the type of its field."""


@dataclasses.dataclass
class Item:
    """A value with its source location and the override that wrote it, if any."""

    value: Any
    where: str
    override: str = ""

    def fault(self, path: str, message: str) -> str:
        """Returns a message that starts with the location of this item and the path of its key."""
        subject = self.override or path
        if self.override and self.override.partition("=")[0].strip() != path:
            subject += f": {path}"
        message = message.replace("\n", "\n  ")
        return ": ".join(part for part in (self.where, subject, message) if part)


def join(path: str, key: str | int) -> str:
    """Returns the path of a key within the section at `path`."""
    return f"{path}.{key}" if path else str(key)


def read_file(path: str | os.PathLike[str]) -> tuple[Item, list[str]]:
    """Returns the content of a YAML file and its faults (duplicate keys).

    Raises:
        ConfigError: If the file is missing or unreadable, is not YAML, or exceeds the size limits.
    """
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            text = _read_text(file, name)
    except FileNotFoundError:
        folder = os.path.dirname(name)
        siblings = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        stems = [Path(sibling).stem for sibling in siblings if sibling.endswith(".yaml")]
        near = did_you_mean(Path(name).stem, stems).replace("'?", ".yaml'?")
        fix = near or (
            "\n  Give a YAML file, or the directory of a run. In a YAML file, `model: llama3-8b` "
            "names a published model."
        )
        raise ConfigError(f"{name}: no such config file.{fix}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{name}: the config file cannot be read: {reason}.") from None
    return parse(text, name)


def parse(text: str, name: str) -> tuple[Item, list[str]]:
    """Returns a YAML document as a tree and its faults.

    Raises:
        ConfigError: If the text is not one YAML document, or exceeds the size limits.
    """
    try:
        node = _compose(text, name)
    except _NotYaml as error:
        raise ConfigError(f"{name}:{error.line}: not a YAML document: {error}.") from None
    reader = _NodeReader(name)
    root = Item({} if node is None else reader.value(node, ""), name)
    if isinstance(root.value, Plain) and not root.value:
        root.value = {}
    return root, reader.faults


class _NotYaml(Exception):
    def __init__(self, problem: str, line: int):
        super().__init__(problem)
        self.line = line


def _compose(text: str, name: str) -> yaml.Node | None:
    """Returns PyYAML's tree of nodes, or None for an empty document."""
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = error.problem or str(error)
        is_tab = "'\\t'" in problem
        raise _NotYaml(problem + "; indent with spaces" * is_tab, line) from None
    except yaml.reader.ReaderError as error:  # A character that YAML forbids.
        position = error.position if isinstance(error.position, int) else 0
        line = text.count("\n", 0, position) + 1
        raise _NotYaml(f"the character #x{error.character:04x} is not allowed", line) from None
    except RecursionError:
        raise _too_deep(name) from None
    if node is not None:
        _check_size(node, name)
    return node


def _read_text(file: TextIO, name: str) -> str:
    """Returns the whole text of a file.

    Raises:
        ConfigError: If the file exceeds the size limit of a config.
    """
    # The file system's size is not used: pipes and devices have none.
    text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        size = os.fstat(file.fileno()).st_size
        size_text = f"{size:,}" if size > _MOST_BYTES else f"more than {_MOST_BYTES:,}"
        raise ConfigError(f"{name}: {size_text} bytes, but a config has at most {_MOST_BYTES:,}.")
    return text


def _check_size(root: yaml.Node, name: str) -> None:
    """Counts the values of a tree of PyYAML's nodes without expanding aliases.

    Raises:
        ConfigError: If the tree exceeds the limits of a config in size or depth, or is recursive.
    """
    try:
        count, depth = _measured(root, {}, name)
    except RecursionError:
        raise _too_deep(name) from None
    if depth > _MOST_DEPTH:
        raise _too_deep(name)
    if count > _MOST_VALUES:
        # The exact count may have thousands of digits.
        count_text = f"{count:,}" if count < 10**12 else "more than a trillion"
        raise ConfigError(
            f"{name}: {count_text} values, keys and aliases included, but a config has at most "
            f"{_MOST_VALUES:,}."
        )


def _too_deep(name: str) -> ConfigError:
    """Returns the error for a document that nests deeper than any config."""
    return ConfigError(f"{name}: values nest more than {_MOST_DEPTH} deep, which no config does.")


def _measured(
    node: yaml.Node, measured: dict[int, tuple[int, int] | None], name: str
) -> tuple[int, int]:
    """Returns the number of values and keys of a node and their depth; visits each node once."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if id(node) in measured:
        count_and_depth = measured[id(node)]
        if count_and_depth is None:
            line = node.start_mark.line + 1
            raise ConfigError(f"{name}:{line}: an alias refers to a value that contains it.")
        return count_and_depth
    measured[id(node)] = None
    is_mapping = isinstance(node, yaml.MappingNode)
    # Keys count too: a key that is not plain is rejected later, but only after its expansion.
    children = itertools.chain.from_iterable(node.value) if is_mapping else node.value
    measures = [_measured(child, measured, name) for child in children]
    count = 1 + sum(count for count, _ in measures)
    depth = 1 + max((depth for _, depth in measures), default=0)
    measured[id(node)] = count, depth
    return count, depth


class _NodeReader:
    """Turns PyYAML's nodes into items, leaving plain scalars as text."""

    def __init__(self, name: str):
        self.name = name
        self.faults: list[str] = []

    def where(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"

    def fault(self, node: yaml.Node, path: str, message: str) -> None:
        self.faults.append(Item(None, self.where(node)).fault(path, message))

    def value(self, node: yaml.Node, path: str) -> Any:
        import yaml

        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.fault(node, path, f"the tag {tag} is not allowed here.")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [
                Item(self.value(child, join(path, index)), self.where(child))
                for index, child in enumerate(node.value)
            ]
        assert isinstance(node, yaml.ScalarNode)
        return node.value if node.style else Plain(node.value)

    def mapping(self, node: yaml.Node, path: str) -> dict[str, Item]:
        import yaml

        own: dict[str, Item] = {}
        merged: dict[str, Item] = {}
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fault(key, path, "a key must be text.")
            elif key.value == "<<" and not key.style:
                for base in child.value if isinstance(child, yaml.SequenceNode) else [child]:
                    if isinstance(base, yaml.MappingNode):
                        merged = {**self.mapping(base, path), **merged}
                    else:
                        self.fault(key, path, "<< merges mappings only.")
            elif key.value in own:
                first = own[key.value].where.rpartition(":")[2]
                message = f"the key is given twice, first in line {first}. Remove one."
                self.fault(key, join(path, key.value), message)
            else:
                value = self.value(child, join(path, key.value))
                own[key.value] = Item(value, self.where(key))
        return {**merged, **own}


def from_python(value: object, where: str) -> Item:
    """Returns plain Python data, such as JSON, as a tree."""
    if isinstance(value, Mapping):
        return Item({str(key): from_python(child, where) for key, child in value.items()}, where)
    if isinstance(value, list | tuple):
        return Item([from_python(child, where) for child in value], where)
    return Item(value, where)


def apply_overrides(
    root: Item, overrides: Sequence[str], named: Mapping[str, str] | None = None
) -> list[str]:
    """Writes `key.path=value` overrides into a tree in order, and returns their faults.

    `named` gives the sections for which a text may stand, with the key that it is the value of.
    """
    faults = []
    _as_sections(root, named or {})
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            faults.append(
                f"{COMMAND_LINE}: {override}: not an override. Write key.path=value, "
                "for example train.steps=100."
            )
            continue
        try:
            value = _override_value(text, path.strip(), override)
            _write(root, keys, value, override)
            _as_sections(root, named or {})
        except ConfigError as error:
            faults.append(str(error))
    return faults


def _as_sections(root: Item, named: Mapping[str, str]) -> None:
    """Replaces a text by a section with the text as one of its keys, so that later overrides add
    to it."""
    for section, key in named.items():
        item = root.value.get(section) if isinstance(root.value, dict) else None
        if item is not None and isinstance(item.value, str) and not as_null(item.value):
            item.value = {key: Item(item.value, item.where, item.override)}


def fill(root: Item, implied: Mapping[str, Any], where: str) -> None:
    """Writes plain values into a tree where it has none."""
    for key, value in implied.items():
        if key not in root.value:
            root.value[key] = from_python(value, where)
            continue
        given = root.value[key]
        if isinstance(value, Mapping) and given.value == "":  # `data:` without keys.
            given.value = {}
        if isinstance(value, Mapping) and isinstance(given.value, dict):
            fill(given, value, where)


def _override_value(text: str, path: str, override: str) -> Any:
    """Reads `[..]`, `{..}` and quotes as YAML; any other value is text that its field parses.

    `data.path=*.txt` and `prompt=def f():` are thus plain text, although YAML gives them a meaning.
    """
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        reader = _NodeReader(COMMAND_LINE)
        try:
            node = _compose(text, f"{COMMAND_LINE}: {path}")
        except _NotYaml as error:
            raise ConfigError(f"{COMMAND_LINE}: {override}: not YAML: {error}.") from None
        assert node is not None  # The text has a value.
        value = reader.value(node, path)
        if reader.faults:
            raise ConfigError(f"{COMMAND_LINE}: {override}: {reader.faults[0].partition(': ')[2]}")
        return _attributed(Item(value, COMMAND_LINE), override).value
    return Plain(text)


def _attributed(item: Item, override: str) -> Item:
    """Returns the item with all its values attributed to one override."""
    value = item.value
    if isinstance(value, dict):
        value = {key: _attributed(child, override) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_attributed(child, override) for child in value]
    return Item(value, COMMAND_LINE, override)


def _write(root: Item, keys: list[str], value: object, override: str) -> None:
    item = root
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        new = Item(value if last else {}, COMMAND_LINE, override)
        if isinstance(item.value, list):
            if not key.isdecimal() or int(key) >= len(item.value):
                raise ConfigError(
                    f"{COMMAND_LINE}: {override}: {'.'.join(keys[:depth])} is a list of "
                    f"{len(item.value)}, so {key!r} must be an index below that."
                )
            index = int(key)
            item.value[index] = new if last else item.value[index]
            item = item.value[index]
            continue
        if not isinstance(item.value, dict):  # A mapping replaces a scalar: mesh.fsdp=4.
            item.value, item.where, item.override = {}, COMMAND_LINE, override
        if last or key not in item.value:
            item.value[key] = new
        item = item.value[key]


# Python refuses to parse a few thousand digits; no number of a config needs as many.
_MOST_DIGITS = 1000
_INTEGER = re.compile(r"[-+]?\d+(_\d+)*")
_NUMBER = re.compile(r"[-+]?(\d+(_\d+)*\.?(\d+(_\d+)*)?|\.\d+(_\d+)*)([eE][-+]?\d+)?")
_SPECIAL = re.compile(r"[-+]?\.?inf|\.?nan", re.IGNORECASE)
_NULLS = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False}


def as_null(text: str) -> bool:
    """Whether a plain scalar means null."""
    return text in _NULLS


def as_bool(text: str) -> bool | None:
    """Returns the boolean that a plain scalar means, or None."""
    return _BOOLS.get(text.lower())


def as_integer(text: str) -> int | None:
    """Returns the integer (`12`, `1_000`) that a plain scalar means, or None."""
    if not _INTEGER.fullmatch(text) or len(text) > _MOST_DIGITS:
        return None
    return int(text)


def as_number(text: str) -> float | None:
    """Returns the number (`1e-3`, `.5`, `12`, `.inf`) that a plain scalar means, or None."""
    if _NUMBER.fullmatch(text):
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else None


def natural(item: Item) -> Any:
    """Returns the value of an item without a type hint, by YAML 1.2, so `no` is text."""
    value = item.value
    if isinstance(value, dict):
        return {key: natural(child) for key, child in value.items()}
    if isinstance(value, list):
        return [natural(child) for child in value]
    return natural_scalar(value) if isinstance(value, Plain) else value


def natural_scalar(text: str) -> Any:
    """Returns the value of a plain scalar without a type hint."""
    if as_null(text):
        return None
    if text.lower() in ("true", "false"):
        return as_bool(text)
    for read in (as_integer, as_number):
        value = read(text)
        if value is not None:
            return value
    return str(text)
