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
        path: The YAML file; None starts from nothing but the overrides and the defaults.
        overrides: Applied in order. A value in `[]`, `{}` or quotes is YAML; any other is text,
            which the type of its field reads.

    Raises:
        ConfigError: With one line for each fault of the file and of the overrides.
    """
    root, faults = (_Item({}, _COMMAND_LINE), []) if path is None else _read_file(path)
    faults += _apply_overrides(root, overrides)
    return _filled(cls, root, faults)


def from_dict(cls: type[_T], data: _Mapping[str, _Any], source: str) -> _T:
    """Returns a config from plain data, such as `to_dict` gives.

    Args:
        cls: The configclass to fill.
        data: Its keys and values.
        source: What to call the data in messages.

    Raises:
        ConfigError: With one line for each fault.
    """
    return _filled(cls, _from_python(data, source), [])


def from_yaml(text: str, name: str) -> _Any:
    """Returns the plain data of a YAML document that is not a config, as safely as if it were one.

    Args:
        text: One YAML document.
        name: What to call it in messages.

    Raises:
        ConfigError: If it is not one YAML document, holds a key twice or a tag, or stands for more
            than any config does.
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
