"""The directory of a run's checkpoints: its steps, their removal and their retention.

    run/checkpoints/
      00000500/                        one checkpoint; the name is the step
      00001000/
      00001500.orbax-checkpoint-tmp/   a checkpoint being written, or left by a killed process
      .trash/                          checkpoints being deleted
      .damaged/                        checkpoints that did not validate, set aside

A checkpoint appears and disappears by a single rename, so a kill at any time never leaves a listed
directory that cannot be restored. Other files in the directory are left alone.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Container, Iterable, Mapping

from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.checksums import sync
from shardlib.checkpoint.config import CheckpointConfig
from shardlib.checkpoint.errors import DamageError, first_line, listed
from shardlib.checkpoint.manifest import Manifest
from shardlib.errors import CheckpointError, SaveFailedError

Notify = Callable[[str], None]

STEP_NAME = re.compile(r"\d{8,}")
# Orbax's own tools treat directories with this suffix as incomplete.
TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
STATE = "state"
TRASH, DAMAGED, PROBE = ".trash", ".damaged", ".probe-"
_ASIDE = re.compile(r"\d{8,}-[0-9a-f]{8}")
# The newest damaged checkpoints are kept for inspection.
DAMAGED_KEPT = 2


class StepDirectory:
    """Lists, deletes and sets aside checkpoints in one directory; threads may share it. The
    directory need not exist. `notify` is called once for each skipped entry."""

    def __init__(self, path: str | os.PathLike[str], notify: Notify) -> None:
        self.path = pathlib.Path(path).absolute()
        if ".." in self.path.parts:  # TensorStore takes no such paths.
            self.path = self.path.resolve()
        self.notify = notify
        self._skipped: set[str] = set()
        self._cache: dict[int, tuple[tuple[int, ...], Manifest]] = {}
        self._lock = threading.RLock()
        self._deletions: list[threading.Thread] = []

    def of_step(self, step: int) -> pathlib.Path:
        """Returns the path of a step's checkpoint, which need not exist."""
        return self.path / f"{step:08d}"

    def temporary(self, step: int) -> pathlib.Path:
        """Returns the path that a step's checkpoint is written to."""
        return self.path / f"{step:08d}{TEMPORARY_SUFFIX}"

    def candidates(self) -> list[int]:
        """Returns the steps of all checkpoints, damaged or not, oldest first.

        A checkpoint has the name of a step and holds a manifest or arrays; a directory with neither
        has never been a checkpoint.

        Raises:
            CheckpointError: If the directory cannot be listed.
        """
        steps = []
        for entry in self._entries():
            if entry.is_symlink():
                self._skip(entry.name, "a symbolic link")
            elif not entry.is_dir(follow_symlinks=False):
                if _is_step(entry.name):  # It takes the name of that step.
                    self._skip(entry.name, "a file")
            elif _is_step(entry.name) and not _is_foreign(entry.path):
                steps.append(int(entry.name))
            elif _is_temporary(entry.name) or entry.name in (TRASH, DAMAGED):
                continue
            elif os.path.isdir(entry.path):  # It may be gone since it was listed.
                self._skip(entry.name, _no_checkpoint(entry.path))
        return sorted(steps)

    def links(self) -> list[int]:
        """Returns the steps whose checkpoint is a symbolic link, oldest first.

        Links are not followed: their targets do not belong to this directory.
        """
        links = [entry.name for entry in self._entries() if entry.is_symlink()]
        return sorted(int(name) for name in links if _is_step(name))

    def _entries(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be listed: {error.strerror}: {self.path}.\n"
                "  Name a directory that this user may read as run_dir."
            ) from error

    def holds(self, step: int) -> bool:
        """Whether the step has a checkpoint, damaged or not, or a symbolic link in its place."""
        return step in (*self.candidates(), *self.links())

    def foreign_steps(self, owner: str | None) -> list[int]:
        """Returns the steps saved by another run; checkpoints without a run id do not count."""
        ids = {step: manifest.run.get("id") for step, manifest in self.manifests().items()}
        return [step for step, run_id in ids.items() if run_id not in (None, owner)]

    def manifests(self) -> dict[int, Manifest]:
        """Returns the manifests of the complete checkpoints by step, oldest first.

        Raises:
            CheckpointError: If the directory cannot be listed.
        """
        complete = {}
        for step in self.candidates():
            try:
                complete[step] = self.read(step)
            except CheckpointError as error:
                # It may be gone since it was listed.
                if self.of_step(step).is_dir():
                    reason = str(error).splitlines()[0]
                    self._skip(self.of_step(step).name, f"not a complete checkpoint ({reason})")
        return complete

    def read(self, step: int) -> Manifest:
        """Returns the manifest of one checkpoint.

        Raises:
            CheckpointError: If the checkpoint is a symbolic link, or its manifest is missing,
                damaged, from another step or in a later format.
        """
        place = self.of_step(step)
        if place.is_symlink():
            raise CheckpointError(
                f"{place} is a symbolic link, which is not followed.\n"
                "  Replace it with its target directory, or remove the link."
            )
        path = place / manifests.FILE_NAME
        if path.is_symlink():
            raise DamageError(
                f"the manifest {path} is a symbolic link.\n  Restore another step; remove this one."
            )
        state = _state_of(path)
        with self._lock:
            cached_state, cached = self._cache.get(step, (None, None))
        if cached is not None and cached_state == state:
            return cached
        manifest = manifests.read(place)
        if manifest.step != step:
            raise DamageError(
                f"the manifest {path} is damaged: it belongs to step {manifest.step}.\n"
                "  Restore another step; remove this one."
            )
        with self._lock:
            self._cache[step] = (state, manifest)
        return manifest

    def clean(self) -> None:
        """Removes the leftovers of killed processes; no save may be in flight."""
        if not self.path.is_dir():
            return
        left = []
        for entry in os.scandir(self.path):
            if entry.name.startswith(PROBE) and entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
            elif _is_temporary(entry.name) and entry.is_dir(follow_symlinks=False):
                left.append(pathlib.Path(entry.path))
        self.discard(left)

    def discard(self, paths: Iterable[pathlib.Path]) -> None:
        """Moves directories to the trash by one rename each, and empties it in the background.

        This also removes the trash of killed processes.
        """
        trash = self.path / TRASH
        with self._lock:
            for path in paths:
                trash.mkdir(exist_ok=True)
                path.rename(trash / f"{path.name}-{uuid.uuid4().hex}")
            self._deletions = [thread for thread in self._deletions if thread.is_alive()]
            if trash.is_dir() and not trash.is_symlink():
                thread = threading.Thread(target=self._empty, args=(trash, list(trash.iterdir())))
                # An ending interpreter starts no thread; the next run cleans up.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._deletions.append(thread)

    def _empty(self, trash: pathlib.Path, entries: list[pathlib.Path]) -> None:
        for entry in entries:
            shutil.rmtree(entry, ignore_errors=True)
        # The lock keeps the trash in place while `discard` moves a directory into it.
        with self._lock, contextlib.suppress(OSError):
            trash.rmdir()

    def set_aside(self, step: int) -> pathlib.Path:
        """Moves a damaged checkpoint aside, so that its step can be saved again; returns its new
        path."""
        damaged = self.path / DAMAGED
        if damaged.is_symlink():
            raise CheckpointError(
                f"{damaged} is a symbolic link.\n  Remove it: damaged checkpoints go there."
            )
        damaged.mkdir(exist_ok=True)
        place = damaged / f"{step:08d}-{uuid.uuid4().hex[:8]}"
        self.of_step(step).rename(place)
        os.utime(place)
        ours = [entry for entry in os.scandir(damaged) if _ASIDE.fullmatch(entry.name)]
        entries = sorted(ours, key=lambda entry: entry.stat().st_mtime_ns)
        self.discard([pathlib.Path(entry.path) for entry in entries[:-DAMAGED_KEPT]])
        return place

    def join(self) -> None:
        """Waits for pending deletions."""
        for thread in list(self._deletions):
            thread.join()

    def _skip(self, name: str, what: str) -> None:
        with self._lock:
            is_new = name not in self._skipped
            self._skipped.add(name)
        if is_new:
            self.notify(f"{self.path / name} is skipped: {what}")


class SaveDirectory(StepDirectory):
    """The directory of checkpoints that a run saves to. The first save creates it. `notify` is also
    called with each error that does not end the run.

    Attributes:
        failures: Number of failed saves since the last complete one.
        last_saved: The last step known to be saved completely; None once that checkpoint has been
            dropped or set aside.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: CheckpointConfig, notify: Notify
    ) -> None:
        super().__init__(path, notify)
        self.config = config
        self.failures = 0
        self.last_saved: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether the config schedules a checkpoint after this step."""
        return self.config.enabled and step % self.config.every_steps == 0

    def has_given_up(self) -> bool:
        """Whether `config.max_failures` saves in a row have failed."""
        return self.failures >= self.config.max_failures

    def check_writable(self) -> None:
        """Raises a `SaveFailedError` if the directory cannot be created or written to."""
        probe = self.path / f"{PROBE}{uuid.uuid4().hex}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"shardlib")
            probe.unlink()
        except OSError as error:
            fix = "Name a directory that this user may write"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                fix = "Free space there"
            raise SaveFailedError(
                f"checkpoints cannot be written: {error.strerror}: {self.path}.\n"
                f"  {fix}, or set checkpoint.enabled=false."
            ) from error

    def complete_steps(self) -> str:
        """Returns the steps of the complete checkpoints as text."""
        try:
            return listed(list(self.manifests()))
        except CheckpointError:
            return "unknown (the directory cannot be listed)"

    def check_new(self, step: int) -> None:
        """Raises a `CheckpointError` if a step is negative or already saved here."""
        fault = "is negative" if step < 0 else None
        with contextlib.suppress(CheckpointError):  # The save raises the reason.
            if step in self.manifests():
                fault = f"is already saved in {self.path}"
        if fault:
            raise CheckpointError(f"step {step} {fault}.\n  Save each step once, counted from 0.")

    def prune(self, step: int) -> None:
        """Deletes the checkpoints that no policy keeps, after the save of a step."""

        def delete() -> None:
            # The new checkpoint must survive a power loss before old ones are deleted.
            sync(self.path)
            saved = self.manifests()
            metrics = {step: manifest.metrics for step, manifest in saved.items()}
            unhealthy = {step for step, each in saved.items() if not each.run.get("healthy", True)}
            stay = {step, *kept(metrics, self.config, unhealthy)}
            self.discard([self.of_step(step) for step in saved if step not in stay])

        self.tolerate("old checkpoints remain", delete)

    def drop_after(self, step: int) -> None:
        """Removes every checkpoint after `step`, the newest first."""
        later = [each for each in self.candidates() if each > step]
        self.discard([self.of_step(each) for each in reversed(later)])

    def forget(self, since: int) -> None:
        """Forgets that a step from `since` on was saved."""
        if self.last_saved is not None and self.last_saved >= since:
            self.last_saved = None

    def tolerate(self, consequence: str, work: Callable[[], None]) -> None:
        """Runs `work` and reports its failure, which does not end the run."""
        try:
            work()
        except (OSError, CheckpointError) as error:
            self.notify(f"{consequence} in {self.path}: {first_line(error)}")


def kept(
    metrics: Mapping[int, Mapping[str, float]],
    config: CheckpointConfig,
    unhealthy: Container[int] = (),
) -> set[int]:
    """Returns the steps that any of the policies keeps, and the newest healthy step. A tie between
    checkpoints goes to the newer one; a checkpoint without the metric is never the best.

    A run saves `"healthy": false` with a state that is not fit to go back to, because the run is in
    the middle of updates that it rejects. These checkpoints count like all others, but the newest
    healthy checkpoint is kept as well.
    """
    stay = set(sorted(metrics)[-config.keep :])
    stay |= set(sorted(step for step in metrics if step not in unhealthy)[-1:])
    if config.keep_every_steps is not None:
        stay |= {step for step in metrics if step % config.keep_every_steps == 0}
    if config.keep_best is not None:
        best = config.keep_best
        sign = -1 if best.mode == "min" else 1
        ranked = sorted(
            (step for step in metrics if best.metric in metrics[step]),
            key=lambda step: (sign * metrics[step][best.metric], step),
            reverse=True,
        )
        stay |= set(ranked[: best.count])
    return stay


def _is_step(name: str) -> bool:
    return STEP_NAME.fullmatch(name) is not None and name == f"{int(name):08d}"


def _no_checkpoint(path: str) -> str:
    """Returns the reason why a directory without the name of a step is skipped."""
    if os.path.isfile(os.path.join(path, manifests.FILE_NAME)):
        return "not a checkpoint (a step is named by 8 digits, such as 00000031)"
    with contextlib.suppress(OSError):
        if any(_is_step(name) for name in os.listdir(path)):
            return "not a checkpoint (it holds some: name it in place of this directory)"
    return "not a checkpoint"


def _is_foreign(path: str) -> bool:
    """Whether a directory is known to hold no part of a checkpoint."""
    for name in (manifests.FILE_NAME, STATE):
        try:
            os.lstat(os.path.join(path, name))
        except FileNotFoundError:
            continue
        except OSError:
            return False  # An unreadable directory may be a checkpoint.
        return False
    return True


def _is_temporary(name: str) -> bool:
    step = name.removesuffix(TEMPORARY_SUFFIX)
    return step != name and STEP_NAME.fullmatch(step) is not None


def _state_of(path: pathlib.Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_ino, status.st_size, status.st_mtime_ns)
