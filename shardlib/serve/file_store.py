"""Files that clients upload, and batches, in one folder.

Source: the OpenAI API reference, "Files" and "Batch".
"""

import contextlib
import json
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from shardlib.errors import ConfigError
from shardlib.serve.file_lock import lock

_LOG = logging.getLogger(__name__)
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")
_LOCK_FILE = "server.lock"


class FileStore:
    """Objects of the API as JSON files, and the content of files next to them, in a folder that is
    made if it is absent.

    Each object is replaced as a whole, so that a kill leaves the old or the new one.

    Raises:
        ConfigError: If the folder cannot be made.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {folder} cannot be made: {error.strerror}.\n  Give another folder."
            ) from None
        self._lock: FileIO | None = None

    def hold(self) -> None:
        """Keeps other servers out of the folder, until `release`.

        Raises:
            ConfigError: If another server uses it, or it cannot be written.
        """
        if self._lock is not None:
            return
        try:
            file = (self.folder / _LOCK_FILE).open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"the folder {self.folder} cannot be written: {error.strerror}.\n"
                "  Give another folder."
            ) from None
        try:
            if not lock(file):
                _LOG.warning("%s has no locks: make sure that no other server uses it", self.folder)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(300).decode(errors="replace").strip() or "another process"
            file.close()
            raise ConfigError(
                f"another server uses the folder {self.folder}: {holder}.\n"
                "  End it, or give each server a folder of its own."
            ) from None
        with contextlib.suppress(OSError):  # On a full disk the lock still keeps others out.
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        self._lock = file

    def release(self) -> None:
        """Leaves the folder to another server."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def new_id(self, kind: str) -> str:
        """Returns an id of a new file or batch."""
        return f"{kind}-{uuid.uuid4().hex}"

    def content(self, identity: str) -> Path:
        """Returns where the content of a file lies."""
        return self.folder / f"{identity}.content"

    def put(self, value: dict[str, Any]) -> dict[str, Any]:
        """Writes an object by its `id`, and returns it."""
        path = self.folder / f"{value['id']}.json"
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        return value

    def get(self, identity: str, kind: str) -> dict[str, Any] | None:
        """Returns an object; None if there is no such file or batch."""
        if not _ID.fullmatch(identity) or not identity.startswith(f"{kind}-"):
            return None
        try:
            return json.loads((self.folder / f"{identity}.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Returns all files or batches, the newest first."""
        found = (self.get(path.stem, kind) for path in self.folder.glob(f"{kind}-*.json"))
        return sorted(filter(None, found), key=lambda one: (-one["created_at"], one["id"]))

    def delete(self, identity: str) -> None:
        """Removes a file, also one that is written in part."""
        for suffix in ("json", "part", "content"):
            (self.folder / f"{identity}.{suffix}").unlink(missing_ok=True)

    def remove_remains(self) -> None:
        """Removes what a kill has left of files that were being written, or deleted."""
        for path in self.folder.glob("*.part"):
            path.unlink()
        for path in self.folder.glob("file-*.content"):
            # The responses of a batch become a file at its end.
            batch = path.stem.replace("file-", "batch-")
            if not any((self.folder / f"{one}.json").exists() for one in (path.stem, batch)):
                path.unlink()

    def add_file(self, name: str, purpose: str, identity: str | None = None) -> dict[str, Any]:
        """Writes the object of a file whose content is written, and returns it."""
        identity = identity or self.new_id("file")
        return self.put(
            {
                "id": identity,
                "object": "file",
                "bytes": self.content(identity).stat().st_size,
                "created_at": int(time.time()),
                "filename": name,
                "purpose": purpose,
                "status": "processed",
            }
        )

    def unfinished(self) -> Iterator[dict[str, Any]]:
        """Yields the batches that are not complete, the oldest first."""
        for batch in reversed(self.all("batch")):
            if batch["status"] in ("validating", "in_progress", "cancelling"):
                yield batch
