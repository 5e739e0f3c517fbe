"""The directory of a run: its layout, and the lock that keeps other runs out of it.

Two runs in one directory would remove each other's checkpoints. The kernel releases the lock when
the process ends in any way, so that a killed run blocks no other.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator

from shardlib.checkpoint.consensus import Peers
from shardlib.config import load, to_yaml
from shardlib.data import Tokenizer, read_tokenizer
from shardlib.data.tokenizer import SETTINGS, JsonTokenizer
from shardlib.errors import ConfigError, DataError, RunDirError, check_run
from shardlib.run.config import RunConfig

_LOCK_FILE = "run.lock"

# Retries after the previous run has removed the file. A file system that cannot tell files apart
# uses them all up.
_TRIES = 9

_held: set[int] = set()


class RunDirectory:
    """A directory that holds one run; it need not exist yet.

    On disk:

        run_id           identity of the run: 32 hex digits, made with the first config and kept
        run.lock         the process that is using the directory, if any: see `hold`
        config.yaml      the resolved config
        tokenizer.json   the tokenizer, if the data is text
        metrics.jsonl    one object per step: see `shardlib.log.metrics`
        events.jsonl     one object per event of the run, from `start` to `end`
        tensorboard/     event files, if enabled
        wandb/           files of Weights & Biases, if enabled
        profile/         profiles of steps, if enabled
        checkpoints/     one directory per step
        stacks-process<i>.txt  stacks of process i when the watchdog last found it hung

    An event has the keys `time` (ISO 8601, UTC), `kind` (such as `start`, `saved`, `rewind`, `end`)
    and `step`, the last finished step. It may have `text`, as shown on the terminal, `facts`, an
    object, and `spent`, the account of the run's time so far, as in the rows of metrics.jsonl.
    Non-finite numbers are written as they are there. A `saved` event names the step of a checkpoint
    that is complete in `checkpoints/`. Each attempt has a `start`, and an `end` unless its process
    was killed (`hung` if the watchdog ended the first process). The facts of an `end` are `how`, in
    words; `error` and `message`, if there was one; and `finished`, true once the run has taken all
    of its steps. Events of attempts whose steps are lost stay.
    `shardlib.log.events.read_events` reads them.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)
        self.identity_file = self.path / "run_id"
        self.config_file = self.path / "config.yaml"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.checkpoints = self.path / "checkpoints"

    def __str__(self) -> str:
        return str(self.path)

    @property
    def identity(self) -> str | None:
        """The unique id of the run; None if the file is missing or invalid."""
        try:
            text = self.identity_file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return text.decode().strip() if re.fullmatch(rb"[0-9a-f]{32}\n?", text) else None

    def check_writable(self) -> None:
        """Checks that the run can be written, and leaves nothing behind.

        Raises:
            ConfigError: If the directory cannot be made, or no file can be written there.
        """
        if "://" in str(self.path) or re.match(r"[a-z0-9]{2,}:/", str(self.path)):
            raise ConfigError(
                f"run_dir {self} is not on a file system.\n"
                "  Set run_dir to a directory, such as one where the remote storage is mounted."
            )
        # `os.path.exists` is False for a path without read access: its parent is tried then.
        existing = next(p for p in (self.path, *self.path.absolute().parents) if os.path.exists(p))
        if not existing.is_dir():
            raise ConfigError(
                f"run_dir {self} cannot be made: {existing} is a file.\n"
                "  Set run_dir to a directory."
            )
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            raise ConfigError(
                f"run_dir {self} cannot be written: {error.strerror}.\n"
                "  Set run_dir to a directory that this user may write."
            ) from None

    def read_config(self) -> RunConfig | None:
        """Returns the config of the run in the directory, or None without a run.

        Raises:
            ConfigError: If the file is damaged.
        """
        return load(RunConfig, self.config_file) if self.config_file.is_file() else None

    def config_of_run(self) -> RunConfig:
        """Returns the config of the run that the directory must hold.

        Raises:
            ConfigError: If the directory is missing or holds no run, or the file is damaged.
        """
        check_run(self.path)
        config = self.read_config()
        if config is None:
            raise ConfigError(
                f"{self} does not hold a run: {self.config_file.name} is missing.\n"
                "  Pass a run directory created by `shardlib train`."
            )
        return config

    def read_tokenizer(self, config: RunConfig) -> Tokenizer | None:
        """Returns the tokenizer of the run, or None for data other than text.

        Raises:
            DataError: If the file is damaged.
        """
        if not self.tokenizer_file.is_file():
            return None
        try:
            return read_tokenizer(self.tokenizer_file, getattr(config.data, "end_of_text", None))
        except DataError as error:
            fault = str(error).splitlines()[0]
            raise DataError(
                f"{fault}\n  Restore the file, for example from a copy of the run."
            ) from error

    def identify(self) -> str | None:
        """Makes the directory, writes an id if it has none, and returns the id."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.identity is None:
            _replace(self.identity_file, f"{uuid.uuid4().hex}\n")
        return self.identity

    def write(self, config: RunConfig, tokenizer: Tokenizer | None) -> None:
        """Makes the directory and writes the config, the tokenizer and, if absent, the run id."""
        self.identify()  # Before the config, whose presence makes the directory a run.
        _replace(self.config_file, to_yaml(config))
        if tokenizer is not None:
            _replace(self.tokenizer_file, tokenizer.to_json())
        if isinstance(tokenizer, JsonTokenizer):
            settings = {"eos_token": tokenizer.end_of_text}
            _replace(self.tokenizer_file.with_name(SETTINGS), json.dumps(settings) + "\n")


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: readers and killed runs see all of it or nothing."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def hold(run_dir: pathlib.Path, notify: Callable[[str], None]) -> Iterator[None]:
    """Keeps other runs out of a directory, and makes it if needed.

    The file exists while the lock is held, and names the holder. The file of a killed process stays
    and is harmless. All processes of a group enter together.

    `notify` is called on the first process if the file system has no locks; other runs are then not
    kept out.

    Raises:
        RunDirError: If another run holds the lock, or the directory cannot be written; on every
            process.
        CheckpointError: If the first process has gone.
    """
    path = run_dir / _LOCK_FILE
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
