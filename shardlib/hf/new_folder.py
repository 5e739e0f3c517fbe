"""Folders that get their files when all are complete."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardlib.errors import CheckpointError, WrongPlaceError

_PARTIAL = ".partial"


def refuse_full(folder: Path) -> None:
    """Raises `WrongPlaceError` unless a folder is absent or empty."""
    # What a killed process has left is replaced.
    if folder.exists() and (
        not folder.is_dir() or any(file.name != _PARTIAL for file in folder.iterdir())
    ):
        raise WrongPlaceError(
            f"{folder} is not an empty folder.\n  Choose another folder, or remove its contents."
        )


@contextlib.contextmanager
def filled(folder: Path, last: str) -> Iterator[Path]:
    """Gives a folder to fill, whose files move to `folder` when all are complete.

    Args:
        folder: A folder that does not exist or is empty. One that exists may be the working
            directory or a mount: it stays in place, and its files come from within.
        last: The file without which the folder cannot be loaded.

    Raises:
        CheckpointError: If the folder cannot be written; nothing is left in it.
    """
    is_there = folder.exists()
    partial = folder / _PARTIAL if is_there else folder.with_name(f".{folder.name}{_PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if is_there:
            for file in sorted(partial.iterdir(), key=lambda file: file.name == last):
                os.replace(file, folder / file.name)
        else:
            os.replace(partial, folder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error}.\n"
            "  Free space or restore access there, or choose another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def on_first_process(action: Callable[[], None], folder: Path) -> None:
    """Runs an action on the first process; all processes must call it, and all get its fault.

    Args:
        action: May raise `CheckpointError`.
        folder: The folder that it writes.

    Raises:
        CheckpointError: If the action does, on every process.
    """
    fault = None
    if jax.process_index() == 0:
        try:
            action()
        except CheckpointError as error:
            fault = error
    failed = np.bool_(fault is not None)
    if jax.process_count() > 1 and multihost_utils.broadcast_one_to_all(failed):
        fault = fault or CheckpointError(
            f"the first process cannot write {folder}.\n  Read its error."
        )
    if fault is not None:
        raise fault
