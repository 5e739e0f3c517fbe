"""JSON Lines with support for non-finite numbers.

JSON has no NaN or infinity. A non-finite number is written as `null`, and listed under `nonfinite`
by name, as in `{"loss": "nan"}`. The name of a number inside a list or an object is its path, as in
`samples/0`.
"""

import contextlib
import json
import math
import operator
from collections.abc import Mapping
from typing import Any

_NONFINITE = "nonfinite"


def encode(row: Mapping[str, Any]) -> bytes:
    """Returns an object as a line that ends with a line feed.

    Arrays of one number become numbers. Other types that JSON lacks, such as paths, become their
    `str`.
    """
    try:
        line = json.dumps(row, allow_nan=False, default=_plain)
    except ValueError:
        wrong: dict[str, str] = {}
        line = json.dumps({**_finite(row, "", wrong), _NONFINITE: wrong}, allow_nan=False)
    return line.encode() + b"\n"


def decode(line: str | bytes) -> dict[str, Any]:
    """Returns the object of a line, with non-finite numbers restored as floats.

    Raises:
        ValueError: If the line is not an object.
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
    """Returns a value with None for non-finite numbers, which are added to `wrong` by path."""
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
