"""One JSON object a line, with all the numbers that there are.

JSON has no NaN and no infinity: such a number is written as `null`, and once more under `nonfinite`
by its name, `{"loss": "nan"}`; the name of one within a list or an object is its path, `samples/0`.
"""

import contextlib
import json
import math
import operator
from collections.abc import Mapping
from typing import Any

_NONFINITE = "nonfinite"


def encode(row: Mapping[str, Any]) -> bytes:
    """Returns an object as a line, with its end.

    Arrays of one number are numbers; what JSON does not know, such as a path, is its `str`.
    """
    try:
        line = json.dumps(row, allow_nan=False, default=_plain)
    except ValueError:
        wrong: dict[str, str] = {}
        line = json.dumps({**_finite(row, "", wrong), _NONFINITE: wrong}, allow_nan=False)
    return line.encode() + b"\n"


def decode(line: str | bytes) -> dict[str, Any]:
    """Returns the object of a line, with non-finite numbers as floats again.

    Raises:
        ValueError: If it is not an object.
    """
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"not an object: {row!r}")
    wrong = row.pop(_NONFINITE, None)
    return _restored(row, "", wrong) if isinstance(wrong, dict) else row


def _plain(value: Any) -> Any:
    for number in (operator.index, float):
        with contextlib.suppress(TypeError, ValueError):
            return number(value)
    return str(value)


def _finite(value: Any, path: str, wrong: dict[str, str]) -> Any:
    """Returns a value without non-finite numbers, which are added to `wrong` by path."""
    if isinstance(value, Mapping):
        return {name: _finite(item, _join(path, name), wrong) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, _join(path, index), wrong) for index, item in enumerate(value)]
    if not isinstance(value, str | int | float | None):
        value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        wrong[path] = str(float(value))
        return None
    return value


def _restored(value: Any, path: str, wrong: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _restored(item, _join(path, name), wrong) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item, _join(path, index), wrong) for index, item in enumerate(value)]
    return float(wrong[path]) if value is None and path in wrong else value


def _join(path: str, name: str | int) -> str:
    return f"{path}/{name}" if path else str(name)
