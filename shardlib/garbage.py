"""Work on many objects without garbage collection."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def garbage_left() -> Iterator[None]:
    """Disables garbage collection in this context.

    A walk over a program makes many objects and needs nearly all of them until it ends. The
    collector would scan them, and all other objects of the process, again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
