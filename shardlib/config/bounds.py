"""Size limits of a config, checked before it is expanded."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, TextIO

from shardlib.errors import ConfigError

if TYPE_CHECKING:
    import yaml

MOST_BYTES = 1 << 18
"""Largest file size. PyYAML takes some seconds for it."""
MOST_VALUES = 10_000
"""Most values and keys with aliases expanded: a hundred bytes of YAML can expand to gigabytes."""
MOST_DEPTH = 64
"""Deepest nesting of values, far below the limit of Python's stack."""


def read_text(file: TextIO, name: str) -> str:
    """Returns the whole text of a file.

    Raises:
        ConfigError: If the file exceeds the size limit of a config.
    """
    # The file system's size is not used: pipes and devices have none.
    text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        size = os.fstat(file.fileno()).st_size
        size_text = f"{size:,}" if size > MOST_BYTES else f"more than {MOST_BYTES:,}"
        raise ConfigError(f"{name}: {size_text} bytes, but a config has at most {MOST_BYTES:,}.")
    return text


def check_size(root: yaml.Node, name: str) -> None:
    """Counts the values of a tree of PyYAML's nodes without expanding aliases.

    Raises:
        ConfigError: If the tree exceeds the limits of a config in size or depth, or is recursive.
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
    """Returns the error for a document that nests deeper than any config."""
    return ConfigError(f"{name}: values nest more than {MOST_DEPTH} deep, which no config does.")


def _measured(
    node: yaml.Node, known: dict[int, tuple[int, int] | None], name: str
) -> tuple[int, int]:
    """Returns the number of values and keys of a node and their depth; visits each node once."""
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            line = node.start_mark.line + 1
            raise ConfigError(f"{name}:{line}: an alias refers to a value that contains it.")
        return found
    known[id(node)] = None
    is_mapping = isinstance(node, yaml.MappingNode)
    # Keys count too: a key that is not plain is rejected later, but only after its expansion.
    children = itertools.chain.from_iterable(node.value) if is_mapping else node.value
    measures = [_measured(child, known, name) for child in children]
    count = 1 + sum(count for count, _ in measures)
    depth = 1 + max((depth for _, depth in measures), default=0)
    known[id(node)] = count, depth
    return count, depth
