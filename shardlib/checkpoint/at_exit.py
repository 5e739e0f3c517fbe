"""The last save of a program that ends without closing its checkpoints."""

import atexit
import logging
import threading
import weakref
from typing import Protocol

from shardlib.errors import CheckpointError


class Closable(Protocol):
    """What may have a save in flight."""

    def close(self) -> None: ...


def close_at_exit(checkpoints: Closable) -> None:
    """Completes the save in flight when the interpreter ends without `close`, or says it is lost.

    `atexit` is too late: by then no thread pool takes work any more. `threading` has the earlier
    hook that `concurrent.futures` itself uses. Python 3.12 starts no threads even there, so that
    a save may fail; it is then reported.
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
