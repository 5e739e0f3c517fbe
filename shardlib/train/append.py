"""Files that are only ever appended to, by a run which outlives a disk that is full for a while."""

import os
import threading
from collections.abc import Callable
from pathlib import Path


class AppendFile:
    """Appends to a file; what is written is in the file at once, for others to follow.

    A disk that is full or gone for a while ends nothing: what cannot be written is kept, and
    written whole and in order with the next for which there is room. Any thread may write.

    Args:
        path: The file, whose directory exists.
        size: Bytes of the file to keep; all of them, when left out.
        warn: Told when something cannot be written, once until it can be again, and at the end if
            some is lost.
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
        # Not buffered by Python: after a failed write, it would not be known what is in the file.
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
                "What is new is kept in memory until there is room."
            )

    def read(self) -> bytes:
        """Returns what is in the file, with what could not be written yet."""
        with self._lock:
            return self.path.read_bytes() + self._waiting

    def cut(self, size: int) -> None:
        """Removes what comes after the first `size` bytes of what `read` returns."""
        with self._lock:
            written = os.fstat(self._descriptor).st_size
            del self._waiting[max(0, size - written) :]
            if size < written:
                os.ftruncate(self._descriptor, size)

    def close(self) -> None:
        """Closes the file; what was written stays. May be called again."""
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
        """Writes what waits; returns what keeps some of it from being written."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as error:
            return error
        return None
