"""Typed, frozen configs: read from YAML and overrides, with every fault reported at once.

```python
@configclass
class TrainConfig:
    steps: int = 1000
    \"\"\"Optimizer steps.\"\"\"

config = load(TrainConfig, "run.yaml", ["steps=2000"])
```
"""

import os as _os
from collections.abc import Mapping as _Mapping
from collections.abc import Sequence as _Sequence
from typing import Any as _Any
from typing import TypeVar as _TypeVar

from shardlib.config.classes import ImportPath as ImportPath
from shardlib.config.classes import Variants as Variants
from shardlib.config.classes import configclass as configclass
from shardlib.config.describe import Key as Key
from shardlib.config.describe import json_schema as json_schema
from shardlib.config.describe import keys as keys
from shardlib.config.dump import ABSENT as ABSENT
from shardlib.config.dump import Change as Change
from shardlib.config.dump import diff as diff
from shardlib.config.dump import to_dict as to_dict
from shardlib.config.dump import to_yaml as to_yaml
from shardlib.config.read import FAILED as _FAILED
from shardlib.config.read import Reader as _Reader
from shardlib.config.tree import COMMAND_LINE as _COMMAND_LINE
from shardlib.config.tree import Item as _Item
from shardlib.config.tree import apply_overrides as _apply_overrides
from shardlib.config.tree import from_python as _from_python
from shardlib.config.tree import natural as _natural
from shardlib.config.tree import parse as _parse
from shardlib.config.tree import read_file as _read_file
from shardlib.errors import ConfigError as _ConfigError

_T = _TypeVar("_T")


def load(
    cls: type[_T], path: str | _os.PathLike[str] | None = None, overrides: _Sequence[str] = ()
) -> _T:
    """Returns a config read from a YAML file, with `key.path=value` overrides on top.

    Args:
        cls: The configclass to fill.
        path: The YAML file; None uses only the defaults and the overrides.
        overrides: Applied in order. A value in `[]`, `{}` or quotes is YAML; any other value is
            text that the type of its field parses.

    Raises:
        ConfigError: If the file or the overrides have faults; the message lists each on a line.
    """
    root, faults = (_Item({}, _COMMAND_LINE), []) if path is None else _read_file(path)
    faults += _apply_overrides(root, overrides)
    return _filled(cls, root, faults)


def from_dict(cls: type[_T], data: _Mapping[str, _Any], source: str) -> _T:
    """Returns a config from plain data, such as the result of `to_dict`.

    Args:
        cls: The configclass to fill.
        data: Its keys and values.
        source: Name of the data in messages.

    Raises:
        ConfigError: If the data has faults; the message lists each on a line.
    """
    return _filled(cls, _from_python(data, source), [])


def from_yaml(text: str, name: str) -> _Any:
    """Returns the plain data of a YAML document other than a config, with the same safety checks.

    Args:
        text: One YAML document.
        name: Name of the document in messages.

    Raises:
        ConfigError: If the text is not one YAML document, has a duplicate key or a tag, or exceeds
            the size limits of a config.
    """
    root, faults = _parse(text, name)
    if faults:
        raise _ConfigError("\n".join(faults))
    return _natural(root)


def _filled(cls: type[_T], root: _Item, faults: list[str]) -> _T:
    reader = _Reader(cls, faults)
    config = reader.read(cls, root, "")
    if not faults:
        assert config is not _FAILED
        return config
    if len(faults) == 1:
        raise _ConfigError(faults[0])
    lines = (fault.replace("\n", "\n  ") for fault in faults)
    raise _ConfigError("\n  ".join([f"the configuration has {len(faults)} faults:", *lines]))
