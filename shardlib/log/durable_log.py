"""Append-only files that tolerate a temporarily full disk, and their lines of JSON.

JSON has no NaN or infinity. A non-finite number is written as `null`, and listed under `nonfinite`
by name, as in `{"loss": "nan"}`. The name of a number inside a list or an object is its path, as in
`samples/0`.
"""

import contextlib
import json
import math
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_NONFINITE = "nonfinite"


class AppendFile:
    """Appends to a file without buffering, so that others can follow it.

    A disk that is full or missing for a while raises no error: unwritten data is kept in memory and
    written in order once there is room. Any thread may write.

    Args:
        path: The file, whose directory exists.
        size: Number of leading bytes of the file to keep; None keeps all.
        warn: Called at the first failed write, again only after a successful write, and at
            `close` if data is lost.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        size: int | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.path = Path(path)
        self._warn = warn
        self._has_warned = False
        self._lock = threading.Lock()
        self._waiting = bytearray()
        # No Python buffer: after a failed write its state relative to the file would be unknown.
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        if size is not None and size != os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, size)

    def write(self, data: bytes) -> None:
        """Appends bytes.

        Raises:
            ValueError: If the file is closed.
        """
        with self._lock:
            if self._descriptor < 0:
                raise ValueError(f"{self.path} is closed")
            self._waiting += data
            problem = self._try()
        if problem is None:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self.path} cannot be written: {problem.strerror}. "
                "New data is kept in memory until there is room."
            )

    def read(self) -> bytes:
        """Returns the content of the file and the unwritten data."""
        with self._lock:
            return self.path.read_bytes() + self._waiting

    def cut(self, size: int) -> None:
        """Truncates the content that `read` returns to `size` bytes."""
        with self._lock:
            written = os.fstat(self._descriptor).st_size
            del self._waiting[max(0, size - written) :]
            if size < written:
                os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Closes the file. May be called repeatedly."""
        with self._lock:
            if self._descriptor < 0:
                return
            problem = self._try()
            os.close(self._descriptor)
            self._descriptor = -1
        if problem is not None:
            lost = len(self._waiting)
            self._warn(f"{self.path} lacks its last {lost:,} bytes: {problem.strerror}.")

    def _try(self) -> OSError | None:
        """Writes the waiting data; returns the error if some of it cannot be written."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as error:
            return error
        return None


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


def entries(
    text: bytes, is_valid: Callable[[dict[str, Any]], bool]
) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yields the number of each complete line, the line, and its object or None if not valid."""
    # Split only at line feeds: `splitlines` would also split at separators inside strings. The last
    # part is empty, or a line that was being written when the process ended.
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        try:
            row = decode(line)
            yield number, line, row if is_valid(row) else None
        except (ValueError, TypeError):
            yield number, line, None


def foreign(path: Path, number: int, line: bytes, expected: str) -> str:
    """Returns the fault of a line that is not as expected."""
    return f"{path}:{number}: not {expected}: {line.decode(errors='backslashreplace')[:60]!r}."


def _plain(value: Any) -> Any:
    for number in (operator.index, float):
        with contextlib.suppress(TypeError, ValueError):
            return number(value)
    return str(value)


def _finite(value: object, path: str, wrong: dict[str, str]) -> Any:
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


def _restored(value: object, path: str, wrong: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _restored(item, _join(path, name), wrong) for name, item in value.items()}
    if isinstance(value, list):
        return [_restored(item, _join(path, index), wrong) for index, item in enumerate(value)]
    return float(wrong[path]) if value is None and path in wrong else value


def _join(path: str, name: str | int) -> str:
    return f"{path}/{name}" if path else str(name)
