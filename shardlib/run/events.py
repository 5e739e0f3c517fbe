"""`events.jsonl`: what befell a run, one JSON object a line, over all of its attempts."""

import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError
from shardlib.train.append import AppendFile
from shardlib.train.jsonl import decode, encode

EVENTS_FILE = "events.jsonl"


class Events:
    """Appends events to a run's directory; those before it is there are held back until then."""

    def __init__(self):
        self._file: AppendFile | None = None
        self._held: list[bytes] = []

    @property
    def is_open(self) -> bool:
        """Whether the directory is there."""
        return self._file is not None

    @property
    def is_waiting(self) -> bool:
        """Whether there are events that wait for the directory."""
        return self._file is None and bool(self._held)

    def open(self, run_dir: str | os.PathLike[str], warn: Callable[[str], None]) -> None:
        """Opens the file of a directory that exists, and writes what was held back."""
        if self._file is None:
            path = Path(run_dir) / EVENTS_FILE
            # Without a last line that was cut off.
            size = sum(len(line) + 1 for line in _lines(path))
            self._file = AppendFile(path, size=size, warn=warn)
            for line in self._held:
                self._file.write(line)

    def add(self, kind: str, **entries: Any) -> None:
        """Writes an event that happens now; entries that are None or empty are left out."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        given = {name: value for name, value in entries.items() if value not in (None, "", {})}
        line = encode({"time": now.replace("+00:00", "Z"), "kind": kind, **given})
        if self._file is None:
            self._held.append(line)
        else:
            self._file.write(line)

    def close(self) -> None:
        """Closes the file; what was written stays."""
        if self._file is not None:
            self._file.close()


def read_events(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the events of a run in order, as `RunDirectory` describes them.

    Non-finite numbers are floats again. Empty where there are none. A last line that was cut off is
    left out.

    Raises:
        ShardlibError: If another line is not an event.
    """
    path = Path(run_dir) / EVENTS_FILE
    events = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            event = decode(line)
            assert {"time", "kind"} <= event.keys()
        except (ValueError, AssertionError):
            shown = line.decode(errors="backslashreplace")[:60]
            raise ShardlibError(
                f"{path}:{number}: not an event: {shown!r}.\n"
                "  Remove that line, or move the file away."
            ) from None
        events.append(event)
    return events


def last_account(run_dir: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """Returns the account of the last event that has one: `time`, Unix, and `spent`.

    Other lines are passed over, for this decides nothing but who spent which seconds.
    """
    for line in reversed(_lines(Path(run_dir) / EVENTS_FILE)):
        try:
            event = decode(line)
            time = datetime.datetime.fromisoformat(event["time"]).timestamp()
            return {"time": time, "spent": event["spent"]}
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
