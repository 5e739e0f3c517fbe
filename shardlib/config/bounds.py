"""How much a config may hold, found out before anything is made of it."""

from __future__ import annotations

import itertools
import os
from typing import Any, TextIO

from shardlib.errors import ConfigError

MOST_BYTES = 1 << 18
"""Of a file. PyYAML needs some seconds for as much."""
MOST_VALUES = 10_000
"""And keys, after aliases are expanded: a document of a hundred bytes can stand for gigabytes."""
MOST_DEPTH = 64
"""Of values in values: far below where Python's own stack ends."""


def read_text(file: TextIO, name: str) -> str:
    """Returns all of a file.

    Raises:
        ConfigError: If there is more of it than a config has.
    """
    # Without the size that the file system tells: it knows none of a pipe or a device.
    text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        size = os.fstat(file.fileno()).st_size
        size_text = f"{size:,}" if size > MOST_BYTES else f"more than {MOST_BYTES:,}"
        raise ConfigError(f"{name}: {size_text} bytes, but a config has at most {MOST_BYTES:,}.")
    return text


def check_size(root: Any, name: str) -> None:
    """Counts what a tree of PyYAML's nodes stands for, without expanding it.

    Raises:
        ConfigError: If that is more than a config has, or deeper, or without end.
    """
    try:
        count, depth = _measured(root, {}, name)
    except RecursionError:
        raise too_deep(name) from None
    if depth > MOST_DEPTH:
        raise too_deep(name)
    if count > MOST_VALUES:
        # The exact count may have thousands of digits.
        count_text = f"{count:,}" if count < 10**12 else "more than a trillion"
        raise ConfigError(
            f"{name}: {count_text} values, keys and aliases included, but a config has at most "
            f"{MOST_VALUES:,}."
        )


def too_deep(name: str) -> ConfigError:
    """Returns the error for a document whose nesting is not a config's."""
    return ConfigError(f"{name}: values nest more than {MOST_DEPTH} deep, which no config does.")


def _measured(node: Any, known: dict[int, tuple[int, int] | None], name: str) -> tuple[int, int]:
    """Returns how many values and keys a node stands for, how deep they nest; meets each once."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            line = node.start_mark.line + 1
            raise ConfigError(f"{name}:{line}: an alias stands for something that it is part of.")
        return found
    known[id(node)] = None
    is_mapping = isinstance(node, yaml.MappingNode)
    # A key is refused later on unless it is plain, but only once it has been expanded.
    children = itertools.chain.from_iterable(node.value) if is_mapping else node.value
    measures = [_measured(child, known, name) for child in children]
    count = 1 + sum(count for count, _ in measures)
    depth = 1 + max((depth for _, depth in measures), default=0)
    known[id(node)] = count, depth
    return count, depth
