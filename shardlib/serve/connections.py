"""Connections whose clients are waited for, and how long."""

import logging
import time
from collections.abc import Collection, Iterable
from typing import Any

_LOG = logging.getLogger(__name__)


class ConnectionWatch:
    """Finds connections that make no progress.

    Args:
        stalled_seconds: Longest time in which a client reads nothing of a whole response.
        idle_seconds: Longest time without a new request.
    """

    def __init__(self, stalled_seconds: float, idle_seconds: float):
        self._stalled_seconds, self._idle_seconds = stalled_seconds, idle_seconds
        self._seen: dict[Any, tuple[tuple[Any, int], float]] = {}
        """The last request and the buffered bytes of a connection, and since when they are so."""

    def end_stalled(self, connections: Iterable[Any], stalled: Collection[Any]) -> None:
        """Ends the connections that make no progress; they are protocols of uvicorn. `stalled` are
        the addresses of clients that do not read the response that is being sent. What is buffered
        for a client is dropped, so that it holds no memory."""
        now, seen = time.monotonic(), {}
        for connection in connections:
            if connection.client in stalled:
                _end(connection, self._stalled_seconds)
            elif (state := _state(connection)) is not None:
                before, since = self._seen.get(connection, (state, now))
                since = since if state == before else now
                longest = self._stalled_seconds if state[1] else self._idle_seconds
                if now - since > longest:
                    _end(connection, longest)
                else:
                    seen[connection] = state, since
        self._seen = seen


def _state(connection: Any) -> tuple[Any, int] | None:
    """Returns the last request and the buffered bytes of a connection that waits for its client;
    None while a response is made."""
    request = connection.cycle
    if request is not None and not request.response_complete:
        return None
    return request, connection.transport.get_write_buffer_size()


def _end(connection: Any, seconds: float) -> None:
    _LOG.warning("A client made no progress for %g seconds, and is cut off.", seconds)
    connection.transport.abort()
