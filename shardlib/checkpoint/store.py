"""The checkpoints of one run: saved while it trains, listed, and restored onto any mesh.

On disk:

    run/checkpoints/
      00000500/            one checkpoint; the name is the step
        manifest.json      what it is: step, config, mesh, leaves, versions (`manifest.py`)
        state/             the arrays (Orbax: OCDBT, zarr, not compressed)
      00001000/
      .trash/              checkpoints on their way out

A checkpoint is written under a temporary name and appears by one rename. It is deleted by one
rename into `.trash` and removed from there, so that a kill at any time leaves no directory that
is listed and cannot be restored. Anything else in the directory is left alone and never listed.
"""

import atexit
import logging
import os
import pathlib
import re
import shutil
import threading
import types
import uuid
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np

from shardlib.checkpoint import manifest as manifests
from shardlib.checkpoint.config import CheckpointConfig
from shardlib.checkpoint.manifest import Manifest
from shardlib.checkpoint.tree import check_leaves, flatten, leaf_spec, unflatten
from shardlib.errors import CheckpointError

if TYPE_CHECKING:
    from shardlib.checkpoint.arrays import ArrayWriter

STEP_NAME = re.compile(r"\d{8,}")
TRASH = ".trash"


class RunCheckpoints:
    """Saves and restores the state of one run.

    Under several processes each makes its own instance on the same shared directory, and all
    call `save`, `wait`, `latest`, `restore` and `close` together.

    Usable as a context manager: leaving it waits for the save in flight.

    Args:
        directory: Holds the checkpoints, for example `run/checkpoints`; made by the first save.
        config: How many to keep. `every_steps` is for the caller's loop.
    """

    def __init__(
        self, directory: str | os.PathLike[str], config: CheckpointConfig | None = None
    ) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self.config = config or CheckpointConfig()
        self._writer: ArrayWriter | None = None
        self._in_flight: int | None = None
        self._deletion: threading.Thread | None = None

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, oldest first."""
        try:
            entries = list(os.scandir(self.directory))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be listed: {error.strerror}: {self.directory}.\n"
                "  Name a directory that this user may read as run_dir."
            ) from error
        return sorted(
            int(entry.name)
            for entry in entries
            if STEP_NAME.fullmatch(entry.name)
            and entry.name == self._path(int(entry.name)).name
            and entry.is_dir(follow_symlinks=False)
            and (pathlib.Path(entry.path) / manifests.FILE_NAME).is_file()
        )

    def latest(self) -> int | None:
        """Returns the newest step, or None without any; the same on every process."""
        newest = max(self.steps(), default=-1)
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            from jax.experimental import multihost_utils

            newest = int(multihost_utils.broadcast_one_to_all(np.int32(newest)))
        return None if newest < 0 else newest

    def manifest(self, step: int) -> Manifest:
        """Returns what the checkpoint of `step` says of itself, arrays unread.

        Raises:
            CheckpointError: If there is no such checkpoint, or its manifest is damaged.
        """
        if step not in self.steps():
            raise self._missing(step)
        return manifests.read(self._path(step))

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that was given to `save`, as JSON gives it back."""
        return self.manifest(step).run

    def check_writable(self) -> None:
        """Proves that checkpoints can be written, before any training is spent on them.

        Raises:
            CheckpointError: If the directory cannot be made, or no file can be written there.
        """
        probe = self.directory / f".probe-{uuid.uuid4().hex}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"shardlib")
            probe.unlink()
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written: {error.strerror}: {self.directory}.\n"
                "  Name a directory that this user may write as run_dir, or set "
                "checkpoint.enabled=false."
            ) from error

    def save(
        self, step: int, state: Any, metadata: Mapping[str, Any], *, wait: bool = False
    ) -> None:
        """Saves a state; returns once its arrays are copied to the host.

        The state may be donated to the next step at once. A save still in flight is waited for
        first, and its failure raised here.

        Args:
            step: Number of optimizer steps that led to the state; not saved before.
            state: Any pytree of arrays and numbers, typed PRNG keys among them. A scalar that
                lives on one process only is taken from the first process.
            metadata: Any JSON: config, mesh, rules, position in the data.
            wait: Whether to return only when the checkpoint is complete.

        Raises:
            CheckpointError: If the step is saved already, the state or the metadata cannot be
                stored, or writing failed.
        """
        self.wait()
        if step < 0 or step in self.steps():
            raise CheckpointError(
                f"step {step} "
                + ("is negative" if step < 0 else f"is already saved in {self.directory}")
                + ".\n  Save each step once, counted from 0."
            )
        leaves = flatten(state)
        check_leaves(leaves)
        _check_global(leaves)
        document = manifests.describe(step, leaves, metadata).to_json()
        arrays = {path: leaf for path, leaf in leaves.items() if np.prod(np.shape(leaf))}
        if not arrays:
            raise CheckpointError(
                f"the state of step {step} holds no array.\n  Pass the state of the training step."
            )
        writer = self._open_writer()
        self._in_flight = step
        try:
            writer.save(self._path(step), arrays, document)
        except Exception as error:
            raise self._failed(error) from error
        if wait or not self.config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Blocks until the last save is complete, and starts deleting what is not to be kept.

        Raises:
            CheckpointError: If that save failed; what it had written is removed.
        """
        if self._writer is None or self._in_flight is None:
            return
        try:
            self._writer.wait()
        except Exception as error:
            raise self._failed(error) from error
        self._in_flight = None
        if jax.process_index() == 0:
            self._discard([self._path(step) for step in self.steps()[: -self.config.keep]])

    def check(self, step: int, target: Any) -> None:
        """Proves that `restore` would find the leaves of `target`; reads no array.

        Raises:
            CheckpointError: If there is no such checkpoint, or its leaves are not those of
                `target`: each one that is missing, unexpected, or of other shape or dtype is named.
        """
        targets = flatten(target)
        check_leaves(targets)
        expected = {path: leaf_spec(leaf) for path, leaf in targets.items()}
        manifests.check_same_leaves(self._path(step), self.manifest(step).leaves, expected)

    def restore(self, step: int, target: Any) -> Any:
        """Returns the state saved at `step`, bit for bit, on the shardings of `target`.

        Args:
            step: One of `steps()`.
            target: A tree of the structure of the state; leaves are `jax.ShapeDtypeStruct` with
                a sharding of any mesh (or arrays, whose sharding is taken). A leaf without a
                sharding is restored to a numpy array on the host.

        Raises:
            CheckpointError: As `check`, before any array is read; or if it cannot be read.
        """
        from shardlib.checkpoint import arrays

        self.wait()
        self.check(step, target)
        try:
            return unflatten(arrays.read(self._path(step), flatten(target)), target)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {self._path(step)} cannot be read: {_first_line(error)}\n"
                f"  Restore another step ({_listed(self.steps(), without=step)})."
            ) from error

    def close(self) -> None:
        """Waits for the save in flight and for deletions; ends all threads."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
            if self._deletion is not None:
                self._deletion.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # What ended the run matters more than the save that failed after it.
            error.add_note(str(failure))

    def _path(self, step: int) -> pathlib.Path:
        return self.directory / f"{step:08d}"

    def _open_writer(self) -> "ArrayWriter":
        if self._writer is None:
            from shardlib.checkpoint.arrays import TEMPORARY_SUFFIX, ArrayWriter

            self.check_writable()
            if jax.process_index() == 0:
                # Left by a run that was killed while it saved or deleted.
                abandoned = self.directory.glob(f"*{TEMPORARY_SUFFIX}")
                self._discard([path for path in abandoned if path.is_dir()])
            self._writer = ArrayWriter()
            _close_at_exit(self)
        return self._writer

    def _discard(self, paths: list[pathlib.Path]) -> None:
        """Takes directories out of sight by a rename each, and removes them in the background."""
        trash = self.directory / TRASH
        for path in paths:
            trash.mkdir(exist_ok=True)
            path.rename(trash / f"{path.name}-{uuid.uuid4().hex}")
        if self._deletion is not None:
            self._deletion.join()
        if trash.exists():
            self._deletion = threading.Thread(
                target=shutil.rmtree, args=(trash,), kwargs={"ignore_errors": True}
            )
            self._deletion.start()

    def _failed(self, error: Exception) -> CheckpointError:
        """Gives the space of a failed save back, and returns the error to raise for it."""
        from shardlib.checkpoint.arrays import TEMPORARY_SUFFIX

        step, self._in_flight = self._in_flight, None
        assert step is not None
        if jax.process_index() == 0:
            shutil.rmtree(f"{self._path(step)}{TEMPORARY_SUFFIX}", ignore_errors=True)
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.directory}: "
            f"{_first_line(error)}\n"
            f"  Free space or restore access there; complete steps: {_listed(self.steps())}."
        )

    def _missing(self, step: int) -> CheckpointError:
        return CheckpointError(
            f"there is no checkpoint of step {step} in {self.directory}.\n"
            f"  Steps there: {_listed(self.steps())}."
        )


def _close_at_exit(checkpoints: RunCheckpoints) -> None:
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


def _check_global(leaves: Mapping[str, Any]) -> None:
    """Refuses arrays that live on one process of several, of which each may hold another."""
    if jax.process_count() == 1:
        return
    local = [
        f"  {path}: {leaf_spec(leaf)}\n"
        for path, leaf in leaves.items()
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and leaf.ndim
    ]
    if local:
        raise CheckpointError(
            "arrays live on one process only, so that it is not clear which one to save:\n"
            + "".join(local)
            + "  Place them on the mesh: jax.device_put(array, NamedSharding(mesh, P()))."
        )


def _listed(steps: list[int], without: int | None = None) -> str:
    return ", ".join(str(step) for step in steps if step != without) or "none"


def _first_line(error: Exception) -> str:
    """Returns the kind and the first line of an error that may fill a page."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
