"""Append-only files that tolerate a temporarily full disk."""

import os
import threading
from collections.abc import Callable
from pathlib import Path


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
