"""A cache of directories that are computed once, safe for processes that start together."""

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardlib.cache_root import cache_root
from shardlib.errors import DataError

_LOG = logging.getLogger(__name__)
_REPORT_SECONDS = 5.0


def cached(kind: str, key: str, build: Callable[[Path], None], *, task: str) -> Path:
    """Returns the directory of a cache entry, and builds it first if it is missing.

    `build(directory)` fills an empty directory, which gets its final name by one rename: readers
    see all of it or nothing. One process builds under a lock while the others wait. On a file
    system without locks several processes build, and the first to finish wins. `task` says the work
    in words, such as "tokenising corpus.txt"; it is logged while it lasts.

    Raises:
        DataError: If the cache directory cannot be written.
    """
    folder = cache_root() / kind
    final = folder / key
    if final.is_dir():
        return final
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=folder))
    except OSError as error:
        raise DataError(
            f"the cache directory {cache_root()} cannot be written: {error.strerror}.\n"
            f"  Set SHARDLIB_CACHE to a writable directory."
        ) from error
    try:
        with _reported(task), _lock(folder / f".{key}.lock"):
            if not final.is_dir():
                _LOG.info("%s once, into the cache", task)
                build(temporary)
                _publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def read_array(file: Path) -> np.ndarray:
    """Returns the array of a `.npy` file without allocating more than the file holds.

    Raises:
        ValueError: If the file is shorter than it declares, or holds objects.
    """
    return np.array(np.lib.format.open_memmap(file, mode="r"))


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Turns errors of reading a cache entry into a `DataError`.

    Raises:
        DataError: If the files of the entry are damaged.
    """
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{directory} in the cache is damaged: {error}.\n  Remove it; it will be rebuilt."
        ) from error


@contextlib.contextmanager
def _reported(task: str) -> Iterator[None]:
    """Logs the seconds that a task has taken, after 5, 10, 20, ... of them."""
    done = threading.Event()
    start = time.monotonic()

    def report() -> None:
        seconds = _REPORT_SECONDS
        while not done.wait(start + seconds - time.monotonic()):
            _LOG.warning("%s, once, into the cache: %g s so far", task, seconds)
            seconds *= 2

    thread = threading.Thread(target=report, name="shardlib-cache", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _publish(temporary: Path, final: Path) -> None:
    # mkdtemp makes a private directory; a cache on a shared file system may serve several users.
    temporary.chmod(0o755)
    try:
        temporary.rename(final)
    except OSError:
        if not final.is_dir():
            raise


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # Some network file systems have no locks.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
