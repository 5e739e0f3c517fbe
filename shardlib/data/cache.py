"""A directory of things computed once, safe for several processes that start together."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardlib.cache_root import cache_root
from shardlib.errors import DataError


def cached(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """Returns the directory of a cached thing, built first where it is absent.

    `build(directory)` fills an empty directory, which takes its final name by one rename: readers
    see all of it or nothing. A lock lets one process build while the others wait for it. Where the
    file system has no locks, several build, and the first to finish wins.

    Args:
        kind: What it is, a plain word.
        key: A digest of all that it depends on.
        build: Computes it.

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
            f"  Set SHARDLIB_CACHE to a directory that can."
        ) from error
    try:
        with _lock(folder / f".{key}.lock"):
            if not final.is_dir():
                build(temporary)
                _publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def read_array(file: Path) -> np.ndarray:
    """Returns the array of a `.npy` file, for which no more is allocated than the file holds.

    Raises:
        ValueError: If the file does not hold what it declares, or objects.
    """
    return np.array(np.lib.format.open_memmap(file, mode="r"))


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Reads a cached thing.

    Raises:
        DataError: If that fails because its files are not those that were written.
    """
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(
            f"{directory} in the cache is damaged: {error}.\n  Remove it; it will be made again."
        ) from error


def _publish(temporary: Path, final: Path) -> None:
    # mkdtemp makes it private; a cache on a shared file system may serve several users.
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
