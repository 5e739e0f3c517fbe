"""A lock that one process has on a file; the kernel releases it when the process ends."""

from typing import IO


def lock(file: IO[bytes]) -> bool:
    """Locks a file until it is closed; returns whether its file system has locks.

    Raises:
        BlockingIOError: If the file is locked.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # Some network file systems have no locks.
        return False
    return True
