"""Events of a run over all of its attempts, in `events.jsonl`: one JSON object per line."""

import contextlib
import datetime
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError
from shardlib.log.durable_log import AppendFile, encode, entries, foreign

EVENTS_FILE = "events.jsonl"


class Events:
    """Appends events to a run's directory; events before `open` are held back until then.

    Events after `close`, such as late ones from another thread, are also written. Any thread may
    add events.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._file: AppendFile | None = None
        self._held: list[bytes] = []
        self._closed: tuple[Path, Callable[[str], None]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the file is open: after `open` and before `close`."""
        return self._file is not None

    @property
    def is_waiting(self) -> bool:
        """Whether there are events waiting for the directory."""
        return bool(self._held)

    def open(self, run_dir: str | os.PathLike[str], warn: Callable[[str], None]) -> None:
        """Opens the file in an existing directory and writes the held-back events."""
        with self._lock:
            if self._file is not None:
                return
            path = Path(run_dir) / EVENTS_FILE
            self._file = _opened(path, warn)
            self._write_held(self._file)
            self._closed = path, warn

    def add(self, kind: str, **entries: object) -> None:
        """Writes an event with the current time; entries that are None or empty are dropped."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        given = {name: value for name, value in entries.items() if value not in (None, "", {})}
        line = encode({"time": now.replace("+00:00", "Z"), "kind": kind, **given})
        with self._lock:
            self._held.append(line)
            if self._file is not None:
                self._write_held(self._file)
            elif self._closed is not None:
                self._write_late(*self._closed)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write_held(self, file: AppendFile) -> None:
        while self._held:
            file.write(self._held.pop(0))

    def _write_late(self, path: Path, warn: Callable[[str], None]) -> None:
        """Reopens the file to write the held-back events; reports an event that is lost."""
        try:
            file = _opened(path, warn)
        except OSError as error:
            lost = self._held.pop().decode().rstrip()
            warn(f"{path} cannot be written: {error.strerror}. It lacks {lost}")
        else:
            self._write_held(file)
            file.close()


def read_events(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the events of a run in order, as `RunDirectory` describes them.

    Non-finite numbers are restored as floats. The list is empty without an event file. A truncated
    last line is dropped.

    Raises:
        ShardlibError: If another line is not an event.
    """
    path, events = Path(run_dir) / EVENTS_FILE, []
    for number, line, event in entries(_text(path), lambda event: {"time", "kind"} <= event.keys()):
        if event is None:
            fault = foreign(path, number, line, "an event")
            raise ShardlibError(f"{fault}\n  Remove that line, or move the file away.")
        events.append(event)
    return events


def last_account(run_dir: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """Returns the account of the last event that has one: `time` (Unix), `spent` and `finished`.

    `finished` is True if the run had completed all of its steps by then. Other and malformed lines
    are skipped, because the account only affects the goodput.
    """
    for event in reversed(_readable(run_dir)):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            time = datetime.datetime.fromisoformat(event["time"]).timestamp()
            spent = {share: float(seconds) for share, seconds in event["spent"].items()}
            finished = event.get("facts", {}).get("finished") is True
            return {"time": time, "spent": spent, "finished": finished}
    return None


def saved_step(run_dir: str | os.PathLike[str]) -> int | None:
    """Returns the newest step that the events of a run record as saved in its directory.

    It is None without such a step, or if the run has gone back to its start since. Malformed lines
    are skipped, so that they cannot keep a run from resuming.
    """
    saved = None
    for event in _readable(run_dir):
        try:
            kind, step = event["kind"], int(event["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if kind == "saved":
            saved = step
        elif kind == "rewind" and saved is not None:
            saved = min(saved, step) or None
    return saved


def _opened(path: Path, warn: Callable[[str], None]) -> AppendFile:
    """Opens the file and removes a truncated last line."""
    return AppendFile(path, size=_text(path).rfind(b"\n") + 1, warn=warn)


def _readable(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Returns the objects of all lines that hold one."""
    lines = entries(_text(Path(run_dir) / EVENTS_FILE), lambda event: True)
    return [event for _, _, event in lines if event is not None]


def _text(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
