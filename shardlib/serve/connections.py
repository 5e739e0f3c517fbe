"""Connections whose clients are waited for, and how long."""

import logging
import time
from collections.abc import Iterable
from typing import Any

_LOG = logging.getLogger(__name__)
_IDLE = -1
"""In place of bytes, for a connection without an open request."""


class ConnectionWatch:
    """Finds connections that make no progress.

    Args:
        stalled_seconds: Longest time in which a client reads nothing of what is written.
        idle_seconds: Longest time without a whole request.
    """

    def __init__(self, stalled_seconds: float, idle_seconds: float):
        self._stalled_seconds, self._idle_seconds = stalled_seconds, idle_seconds
        self._seen: dict[Any, tuple[int, float]] = {}
        """Bytes that wait for the client, and since when they did not get fewer."""

    def end_stalled(self, connections: Iterable[Any]) -> None:
        """Ends the connections that make no progress; they are protocols of uvicorn. What is
        buffered for their clients is dropped, so that they hold no memory."""
        now, seen = time.monotonic(), {}
        for connection in connections:
            waiting = _waiting(connection)
            before, since = self._seen.get(connection, (waiting, now))
            has_moved = waiting < before or (before < 0) != (waiting < 0)
            since = now if has_moved or not waiting else since
            longest = self._idle_seconds if waiting == _IDLE else self._stalled_seconds
            if now - since > longest:
                _LOG.warning("A client made no progress for %g seconds, and is cut off.", longest)
                connection.transport.abort()
            else:
                seen[connection] = waiting, since
        self._seen = seen


def _waiting(connection: Any) -> int:
    """Returns the bytes that wait for a client, or that it has no open request."""
    if size := connection.transport.get_write_buffer_size():
        return size
    request = connection.cycle
    return _IDLE if request is None or request.response_complete else 0
