"""Detection of lost peers: a process that loses others of its group ends with a specific code.

JAX's behavior depends on which process has gone and how. If a peer dies, collectives on CPUs raise
an error at once. If the first process dies, or any process is silent for the heartbeat timeout,
JAX's coordination client ends the process with SIGABRT, from a C++ thread, and only a handler of
that signal can step in. If a peer merely hangs in Python, nothing happens at all, and the watchdog
must act.
"""

import contextlib
import ctypes
import os
import re
import signal
import threading
from collections.abc import Collection, Iterator
from typing import Any

import jax

from shardlib.errors import PeerLostError
from shardlib.runtime.exit_codes import HUNG

_TASKS = "/proc/self/task"

_LOST_PEER_TEXT = re.compile(
    r"Gloo [\w-]+ failed"
    r"|remote process exited or there was a network error"  # NCCL
    r"|Connection (?:reset|closed) by peer"
    r"|tasks are unhealthy|CoordinationServiceError|coordination service"
)
# Status codes of gRPC for an unreachable peer; other libraries use them for unreachable storage.
_JAX_STATUS = re.compile(r"^(?:UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED):")

_own_threads: set[int] = set()
# The C handler and the objects it references must live as long as the process.
_kept_alive: list[Any] = []


def lost_peers(error: BaseException) -> bool:
    """Whether an error, or one of its causes, says that other processes of the group have gone."""
    return any(_names_lost_peers(cause) for cause in _chain(error))


def thread_ids() -> frozenset[int]:
    """Returns the system's ids of this process's threads; empty if it does not list them."""
    try:
        return frozenset(int(name) for name in os.listdir(_TASKS))
    except OSError:
        return frozenset()


@contextlib.contextmanager
def calling_coordination() -> Iterator[None]:
    """Treats the current thread as a thread of the coordination client inside the context."""
    own = threading.get_native_id()
    _own_threads.add(own)
    try:
        yield
    finally:
        _own_threads.discard(own)


def end_when_coordination_fails(threads: Collection[int], index: int) -> None:
    """Makes SIGABRT raised by JAX's coordination client end the process with the code `HUNG`.

    Other aborts are unchanged. The thread tells them apart: the client starts its own threads when
    it joins a group, before any device is used.
    """
    _own_threads.update(threads)
    if not threads or _kept_alive:
        return
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    text = (
        f"process {index} has lost other processes of its group, as said above: ending with exit "
        f"code {HUNG}.\n"
    ).encode()

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def aborted(number: int) -> None:
        if threading.get_native_id() in _own_threads:
            os.write(2, text)
            os._exit(HUNG)
        # The previous handler gets the signal once this one returns.
        libc.signal(number, former)
        signal.raise_signal(number)

    _kept_alive.extend((libc, aborted))
    former = libc.signal(signal.SIGABRT, ctypes.cast(aborted, ctypes.c_void_p))


def _names_lost_peers(error: BaseException) -> bool:
    if isinstance(error, PeerLostError):
        return True
    if not isinstance(error, (RuntimeError, ValueError)):
        return False
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and _JAX_STATUS.search(text):
        return True
    return bool(_LOST_PEER_TEXT.search(text))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    present: BaseException | None = error
    while present is not None and id(present) not in seen:
        seen.add(id(present))
        yield present
        present = present.__cause__ or present.__context__
