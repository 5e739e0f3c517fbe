"""`events.jsonl`: what befell a run, one JSON object a line, over all of its attempts."""

import datetime
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardlib.errors import ShardlibError
from shardlib.train.append import AppendFile
from shardlib.train.jsonl import decode, encode

EVENTS_FILE = "events.jsonl"


class Events:
    """Appends events to a run's directory; those before it is there are held back until then.

    Those that come after `close`, such as what another thread has to say at the very end, are
    written as well. Any thread may add one.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._file: AppendFile | None = None
        self._held: list[bytes] = []
        self._closed: tuple[Path, Callable[[str], None]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the directory is there, and `close` has not been called."""
        return self._file is not None

    @property
    def is_waiting(self) -> bool:
        """Whether there are events that wait for the directory."""
        return bool(self._held)

    def open(self, run_dir: str | os.PathLike[str], warn: Callable[[str], None]) -> None:
        """Opens the file of a directory that exists, and writes what was held back."""
        with self._lock:
            if self._file is not None:
                return
            path = Path(run_dir) / EVENTS_FILE
            self._file = _opened(path, warn)
            self._write_held(self._file)
            self._closed = path, warn

    def add(self, kind: str, **entries: Any) -> None:
        """Writes an event that happens now; entries that are None or empty are left out."""
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
        """Closes the file; what was written stays."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write_held(self, file: AppendFile) -> None:
        while self._held:
            file.write(self._held.pop(0))

    def _write_late(self, path: Path, warn: Callable[[str], None]) -> None:
        """Opens the file once more; what does not get into it is lost, and said to be."""
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
            if not {"time", "kind"} <= event.keys():
                raise ValueError("an event has a time and a kind")
        except (ValueError, TypeError):
            shown = line.decode(errors="backslashreplace")[:60]
            raise ShardlibError(
                f"{path}:{number}: not an event: {shown!r}.\n"
                "  Remove that line, or move the file away."
            ) from None
        events.append(event)
    return events


def last_account(run_dir: str | os.PathLike[str]) -> Mapping[str, Any] | None:
    """Returns the account of the last event that has one: `time`, Unix, `spent`, and `finished`.

    The last says whether the run had taken all of its steps by then. Other lines are passed over,
    for this decides nothing but who spent which seconds.
    """
    for line in reversed(_lines(Path(run_dir) / EVENTS_FILE)):
        try:
            event = decode(line)
            time = datetime.datetime.fromisoformat(event["time"]).timestamp()
            spent = {share: float(seconds) for share, seconds in event["spent"].items()}
            finished = event.get("facts", {}).get("finished") is True
            return {"time": time, "spent": spent, "finished": finished}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def saved_step(run_dir: str | os.PathLike[str]) -> int | None:
    """Returns the newest step that the events of a run record as saved in its directory; None if
    none is, or the run has gone back to its start since.

    What cannot be read is passed over, so that a broken line keeps no run from going on.
    """
    saved = None
    for line in _lines(Path(run_dir) / EVENTS_FILE):
        try:
            event = decode(line)
            kind, step = event["kind"], int(event["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if kind == "saved":
            saved = step
        elif kind == "rewind" and saved is not None:
            saved = min(saved, step) or None
    return saved


def _opened(path: Path, warn: Callable[[str], None]) -> AppendFile:
    """Opens the file without a last line that was cut off."""
    return AppendFile(path, size=sum(len(line) + 1 for line in _lines(path)), warn=warn)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []
