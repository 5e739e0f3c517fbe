"""The directory of a run's checkpoints: which steps there are, and how steps leave it.

    run/checkpoints/
      00000500/                        one checkpoint; the name is the step
      00001000/
      00001500.orbax-checkpoint-tmp/   one being written, or left by a killed process
      .trash/                          checkpoints on their way out
      .damaged/                        checkpoints that did not validate, set aside

A checkpoint appears by one rename and leaves by one rename, so that a kill at any time leaves no
directory that is listed and cannot be restored. Anything else in the directory is left alone.
"""

import contextlib
import os
import pathlib
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable

from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.damage import DamageError
from shardlib.checkpoint.manifest import Manifest
from shardlib.errors import CheckpointError

Notify = Callable[[str], None]

STEP_NAME = re.compile(r"\d{8,}")
# Orbax's own tools know directories of this name as incomplete.
TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
STATE = "state"
TRASH, DAMAGED, PROBE = ".trash", ".damaged", ".probe-"
_ASIDE = re.compile(r"\d{8,}-[0-9a-f]{8}")
# Of those set aside the newest stay, for whoever wants to look at them.
DAMAGED_KEPT = 2


class StepDirectory:
    """Lists, deletes and sets aside checkpoints in one directory; threads may share it.

    Args:
        path: The directory; need not exist.
        notify: Told once of each entry that is skipped.
    """

    def __init__(self, path: pathlib.Path, notify: Notify) -> None:
        self.path = path
        self._notify = notify
        self._told: set[str] = set()
        self._known: dict[int, tuple[tuple[int, ...], Manifest]] = {}
        self._lock = threading.RLock()
        self._deletions: list[threading.Thread] = []

    def of_step(self, step: int) -> pathlib.Path:
        """Returns where the checkpoint of a step is, or would be."""
        return self.path / f"{step:08d}"

    def temporary(self, step: int) -> pathlib.Path:
        """Returns where the checkpoint of a step is written."""
        return self.path / f"{step:08d}{TEMPORARY_SUFFIX}"

    def candidates(self) -> list[int]:
        """Returns the steps of what looks like a checkpoint, damaged or not, oldest first.

        That is by its name, and by a manifest or arrays in it: a directory with neither has never
        been one.

        Raises:
            CheckpointError: If the directory cannot be listed.
        """
        try:
            with os.scandir(self.path) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be listed: {error.strerror}: {self.path}.\n"
                "  Name a directory that this user may read as run_dir."
            ) from error
        steps = []
        for entry in found:
            if entry.is_symlink():
                self._skip(entry.name, "a symbolic link")
            elif not entry.is_dir(follow_symlinks=False):
                if _is_step(entry.name):  # It is in the way of that step.
                    self._skip(entry.name, "a file")
            elif _is_step(entry.name) and not _is_foreign(entry.path):
                steps.append(int(entry.name))
            elif _is_temporary(entry.name) or entry.name in (TRASH, DAMAGED):
                continue
            elif os.path.isdir(entry.path):  # It may have left since it was listed.
                self._skip(entry.name, _no_checkpoint(entry.path))
        return sorted(steps)

    def links(self) -> list[int]:
        """Returns the steps whose checkpoint is a symbolic link, oldest first. None is followed:
        what it leads to is not this directory's to remove or set aside."""
        try:
            with os.scandir(self.path) as entries:
                names = [entry.name for entry in entries if entry.is_symlink()]
        except OSError:  # Who lists the checkpoints is told why.
            return []
        return sorted(int(name) for name in names if _is_step(name))

    def manifests(self) -> dict[int, Manifest]:
        """Returns the manifests of the complete checkpoints by step, oldest first.

        Raises:
            CheckpointError: If the directory cannot be listed.
        """
        found = {}
        for step in self.candidates():
            try:
                found[step] = self.read(step)
            except CheckpointError as error:
                # It may have left since it was listed.
                if self.of_step(step).is_dir():
                    reason = str(error).splitlines()[0]
                    self._skip(self.of_step(step).name, f"no complete checkpoint ({reason})")
        return found

    def read(self, step: int) -> Manifest:
        """Returns the manifest of one checkpoint.

        Raises:
            CheckpointError: If it is a symbolic link, or has none, or that is damaged, of another
                step, or of a later format.
        """
        place = self.of_step(step)
        if place.is_symlink():
            raise CheckpointError(
                f"{place} is a symbolic link, which is not followed.\n"
                "  Put the directory that it leads to in its place, or remove the link."
            )
        path = place / manifests.FILE_NAME
        if path.is_symlink():
            raise DamageError(
                f"the manifest {path} is a symbolic link.\n  Restore another step; remove this one."
            )
        with self._lock:
            known = self._known.get(step)
        state = _state_of(path)
        if known is not None and known[0] == state:
            return known[1]
        manifest = manifests.read(place)
        if manifest.step != step:
            raise DamageError(
                f"the manifest {path} is damaged: it is of step {manifest.step}.\n"
                "  Restore another step; remove this one."
            )
        with self._lock:
            self._known[step] = (state, manifest)
        return manifest

    def clean(self) -> None:
        """Removes what processes that were killed have left; no save may be in flight."""
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
        """Takes directories out of sight by a rename each, and removes them in the background.

        So goes whatever a process that was killed had taken out of sight before.
        """
        trash = self.path / TRASH
        with self._lock:
            for path in paths:
                trash.mkdir(exist_ok=True)
                path.rename(trash / f"{path.name}-{uuid.uuid4().hex}")
            self._deletions = [thread for thread in self._deletions if thread.is_alive()]
            if trash.is_dir() and not trash.is_symlink():
                thread = threading.Thread(target=self._empty, args=(trash, list(trash.iterdir())))
                # An interpreter that is about to end starts none; the next start cleans up.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._deletions.append(thread)

    def _empty(self, trash: pathlib.Path, entries: list[pathlib.Path]) -> None:
        for entry in entries:
            shutil.rmtree(entry, ignore_errors=True)
        # Under the lock, so that it does not vanish below a directory on its way in.
        with self._lock, contextlib.suppress(OSError):
            trash.rmdir()

    def set_aside(self, step: int) -> pathlib.Path:
        """Moves a damaged checkpoint away, so that its step can be saved again; says where to."""
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
        """Waits for deletions."""
        for thread in list(self._deletions):
            thread.join()

    def _skip(self, name: str, what: str) -> None:
        with self._lock:
            is_new = name not in self._told
            self._told.add(name)
        if is_new:
            self._notify(f"{self.path / name} is skipped: {what}")


def _is_step(name: str) -> bool:
    return STEP_NAME.fullmatch(name) is not None and name == f"{int(name):08d}"


def _no_checkpoint(path: str) -> str:
    """Returns what a directory is that has no name of a checkpoint."""
    if os.path.isfile(os.path.join(path, manifests.FILE_NAME)):
        return "no checkpoint (a step is named by 8 digits, such as 00000031)"
    with contextlib.suppress(OSError):
        if any(_is_step(name) for name in os.listdir(path)):
            return "no checkpoint (it holds some: name it in place of this directory)"
    return "no checkpoint"


def _is_foreign(path: str) -> bool:
    """Whether a directory is known to hold nothing of a checkpoint."""
    for name in (manifests.FILE_NAME, STATE):
        try:
            os.lstat(os.path.join(path, name))
        except FileNotFoundError:
            continue
        except OSError:
            return False  # What may not be looked at may be one.
        return False
    return True


def _is_temporary(name: str) -> bool:
    step = name.removesuffix(TEMPORARY_SUFFIX)
    return step != name and STEP_NAME.fullmatch(step) is not None


def _state_of(path: pathlib.Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_ino, found.st_size, found.st_mtime_ns)
