"""One run at a time in a directory: the first process of a run holds a lock on a file there.

Two that wrote to it at once would remove each other's checkpoints. The kernel takes the lock back
when the process ends, in whatever way, so that a run that was killed keeps nobody out.
"""

import contextlib
import os
import pathlib
import socket
from collections.abc import Callable, Iterator

from shardlib.checkpoint.agreement import Peers
from shardlib.errors import RunDirError

FILE_NAME = "run.lock"

# How often the file may turn out to be removed by the run before; where it always does, the file
# system tells no file from another.
_TRIES = 9

_held: set[int] = set()


@contextlib.contextmanager
def hold(run_dir: pathlib.Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of a directory, which is made if need be.

    The file is there while the lock is held, and says who holds it; that of a process that was
    killed stays, and does no harm. All processes of a group enter together.

    Args:
        run_dir: The directory.
        notify: Told, on the first process, if its file system has no locks: nothing is kept out.

    Raises:
        RunDirError: If another run holds it, or it cannot be written; on every process.
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
    """Returns the descriptor of the file, with the lock on it."""
    file = _locked(path, notify)
    for _ in range(_TRIES):
        if _is_at(file, path):
            break
        os.close(file)  # The run before has just removed it.
        file = _locked(path, notify)
    _held.add(file)
    # Where there is no room for it, another run is kept out all the same.
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
        notify(f"{path.parent} cannot be locked ({error}): see to it that no other run uses it")
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
    if file not in _held:  # It is the parent's.
        return
    _held.remove(file)
    # Before the lock goes: later it may be another run's.
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(file)


def _leave_to_parent() -> None:
    # A forked child shares the lock, which would outlive its parent.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_leave_to_parent)
