"""Lock on a run directory: the first process of a run locks a file there.

Two runs in one directory would remove each other's checkpoints. The kernel releases the lock when
the process ends in any way, so that a killed run blocks no other.
"""

import contextlib
import os
import pathlib
import socket
from collections.abc import Callable, Iterator

from shardlib.checkpoint.consensus import Peers
from shardlib.errors import RunDirError

FILE_NAME = "run.lock"

# Retries after the previous run has removed the file. A file system that cannot tell files apart
# uses them all up.
_TRIES = 9

_held: set[int] = set()


@contextlib.contextmanager
def hold(run_dir: pathlib.Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of a directory, and makes it if needed.

    The file exists while the lock is held, and names the holder. The file of a killed process stays
    and is harmless. All processes of a group enter together.

    Args:
        run_dir: The directory.
        notify: Called on the first process if the file system has no locks; other runs are then
            not kept out.

    Raises:
        RunDirError: If another run holds the lock, or the directory cannot be written; on every
            process.
        CheckpointError: If the first process has gone.
    """
    path = run_dir / FILE_NAME
    taken: list[int] = []

    def take(_: list[str]) -> str:
        try:
            taken.append(_take(path, notify))
        except RunDirError as error:
            return str(error)
        return ""

    try:
        if refusal := Peers().decide("lock", "", take):
            raise RunDirError(refusal)
        yield
    finally:
        for file in taken:
            _give_back(file, path)


def _take(path: pathlib.Path, notify: Callable[[str], None]) -> int:
    """Returns the descriptor of the locked file."""
    file = _locked(path, notify)
    for _ in range(_TRIES):
        if _is_at(file, path):
            break
        os.close(file)  # The previous run has just removed it.
        file = _locked(path, notify)
    _held.add(file)
    # On a full disk the lock still keeps other runs out.
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return file


def _locked(path: pathlib.Path, notify: Callable[[str], None]) -> int:
    file = _opened(path)
    try:
        _lock(file)
    except BlockingIOError:
        holder = os.read(file, 300).decode(errors="replace").strip() or "another process"
        os.close(file)
        raise RunDirError(
            f"run_dir {path.parent} is in use by another run: {holder}.\n"
            "  Wait until it has ended, or set run_dir to another directory."
        ) from None
    except (ImportError, OSError) as error:  # Some network file systems have no locks.
        notify(f"{path.parent} cannot be locked ({error}): make sure that no other run uses it")
    return file


def _opened(path: pathlib.Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunDirError(
            f"run_dir {path.parent} cannot be written: {error.strerror}.\n"
            "  Free space or restore access there, then start again."
        ) from None


def _lock(file: int) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(file: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def _give_back(file: int, path: pathlib.Path) -> None:
    if file not in _held:  # It belongs to the parent process.
        return
    _held.remove(file)
    # Before the lock is released: afterwards the file may belong to another run.
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(file)


def _leave_to_parent() -> None:
    # A forked child shares the lock, which would outlive its parent.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_leave_to_parent)
