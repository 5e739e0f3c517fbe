"""Completion of the last save of a program that ends without closing its checkpoints."""

import atexit
import logging
import threading
import weakref
from typing import Protocol

from shardlib.errors import CheckpointError


class Closable(Protocol):
    """An object that may have a save in flight."""

    def close(self) -> None: ...


def close_at_exit(checkpoints: Closable) -> None:
    """Completes the save in flight if the interpreter ends without `close`, or reports its loss.

    `atexit` runs too late: thread pools accept no work by then. `threading` has the earlier hook
    that `concurrent.futures` uses. Python 3.12 starts no threads even there, so a save may still
    fail; the failure is then reported.
    """
    reference = weakref.ref(checkpoints)

    def close() -> None:
        alive = reference()
        if alive is not None:
            try:
                alive.close()
            except CheckpointError as error:
                logging.getLogger(__name__).error(
                    "%s\n  Call close() before the process ends, or use a with statement.",
                    str(error).splitlines()[0],
                )

    register = getattr(threading, "_register_atexit", atexit.register)
    register(close)
