"""The process that serves: its socket, its signals, and its end."""

import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from shardlib.errors import ConfigError
from shardlib.serve.app import Service
from shardlib.serve.connections import ConnectionWatch

_KEEP_ALIVE_SECONDS = 30
_REQUEST_SECONDS = 35
"""Longest time of a connection without a new request: longer than uvicorn keeps one that waits for
its next."""
_FLUSH_SECONDS = 10
"""Longest wait, at the end, for clients to read what is written."""
_TICKS_OF_WATCH = 10
"""Ticks of uvicorn, of 0.1 seconds, between two looks at the connections."""


class Server(uvicorn.Server):
    """A server that answers what is open before it ends, and cuts off clients that stall.

    The first signal to end refuses new requests, and leaves the socket open, so that a balancer
    reads that the server is not ready. The second one ends at once.
    """

    def __init__(self, service: Service, **options: Any):
        config = uvicorn.Config(
            service.gate,
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            # A client is known by the address of its connection.
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            **options,
        )
        super().__init__(config)
        self.service = service
        self.signals: list[int] = []
        self._watch = ConnectionWatch(service.limits.stalled_seconds, _REQUEST_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals.append(sig)
        self.service.drain()
        if len(self.signals) > 1:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self.service.gate.is_draining and self.service.gate.num_open == 0:
            self.should_exit = True
        if counter % _TICKS_OF_WATCH == 0:
            gate, connections = self.service.gate, self.server_state.connections.copy()
            self._watch.end_stalled(connections, gate.stalled)
            gate.stalled.clear()
        return await super().on_tick(counter)


def claim(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address, and does not listen yet.

    Raises:
        ConfigError: If the address cannot be used.
    """
    bound = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        if bound is not None:
            bound.close()
        raise _unusable(f"{host}:{port}", error) from None
    return bound


def _unusable(address: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{address} cannot be used: {error.strerror}.\n  Give another --host or --port."
    )


def run(service: Service, bound: socket.socket, started: Callable[[str], None]) -> int:
    """Serves on a bound socket until a signal ends it; returns the exit code. `started` is called
    with the address once it takes connections.

    It is 0 after the first SIGTERM or SIGINT, once all open requests are answered, and 128 plus the
    signal's number after a second one.

    Raises:
        ConfigError: If another process listens at the address.
    """
    server = Server(service)
    host, port = bound.getsockname()[:2]
    address = f"{f'[{host}]' if ':' in host else host}:{port}"
    with contextlib.closing(bound):
        try:
            # Before the address is printed, so that nobody who reads it is refused.
            bound.listen(server.config.backlog)
        except OSError as error:  # Another server was quicker.
            raise _unusable(address, error) from None
        service.start()
        started(f"http://{address}")
        try:
            server.run([bound])
        finally:
            service.stop()
    is_forced = len(server.signals) > 1
    return 128 + signal.Signals(server.signals[-1]).value if is_forced else 0
