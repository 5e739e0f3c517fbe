"""Shared parts of the commands: arguments, config loading and report output."""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from shardlib.errors import ConfigError

ConfigPath = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="A YAML file, such as configs/quickstart.yaml, or a run's directory."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys to change, such as train.steps=100 or mesh=fsdp=4,tensor=2.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_config(path: str, overrides: list[str] | None) -> Any:
    """Returns the config of a run, before the run's code is imported, so that faults show early.

    The config of a run's directory, given by its path or by its config.yaml, applies to the run in
    that directory, even if the directory was moved. An override of run_dir takes precedence.
    """
    from shardlib.config import load
    from shardlib.config.tree import read_file

    if not os.path.exists(path):
        read_file(path)  # Raises before what takes seconds to import.
    from shardlib.run.config import RunConfig
    from shardlib.run.directory import RunDirectory

    here = RunDirectory(path if os.path.isdir(path) else os.path.dirname(path))
    file = str(here.config_file) if os.path.isdir(path) and here.config_file.is_file() else path
    config = load(RunConfig, file, overrides or ())
    is_of_run = pathlib.Path(file) == here.config_file and here.identity is not None
    is_said = any(word.partition("=")[0].strip() == "run_dir" for word in overrides or ())
    return dataclasses.replace(config, run_dir=str(here)) if is_of_run and not is_said else config


def check_named(path: str, overrides: list[str] | None, run_dir: str) -> None:
    """Refuses to train in another directory than the directory of the named run.

    Raises:
        ConfigError: If `path` names a run, by its directory or its config.yaml, that has no valid
            id, and its config gives another run_dir: the run may be a copy.
    """
    from shardlib.run.directory import RunDirectory

    here = RunDirectory(path if os.path.isdir(path) else os.path.dirname(path))
    is_said = any(word.partition("=")[0].strip() == "run_dir" for word in overrides or ())
    is_run = os.path.isdir(path) or (
        pathlib.Path(path) == here.config_file and here.checkpoints.is_dir()
    )
    if is_said or not is_run or os.path.realpath(run_dir) == os.path.realpath(here.path):
        return
    raise ConfigError(
        f"{here.config_file} gives run_dir {run_dir}, which is not its own directory, "
        f"and a valid {here.identity_file.name} is missing.\n"
        f"  Add run_dir={here} to train this run, or run_dir={run_dir} to train the other."
    )


def check_writable(option: str, path: str) -> None:
    """Checks before any computation that a file can be written.

    Raises:
        ConfigError: If the path is a directory, or its directory is missing or not writable.
    """
    directory = os.path.dirname(path) or "."
    fault = ""
    if os.path.isdir(path):
        fault = "it is a directory"
    elif not os.path.isdir(directory):
        fault = f"the directory {directory} does not exist"
    elif not os.access(path if os.path.exists(path) else directory, os.W_OK):
        fault = "permission denied"
    if fault:
        raise ConfigError(f"{option} {path} cannot be written: {fault}.\n  Name another file.")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns a failed write inside the context into an error that names the file.

    Raises:
        ConfigError: If the system refuses to write the file.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}.\n  Name another file."
        ) from None


def console() -> Any:
    from rich.console import Console

    # Rich takes the width of a terminal, then COLUMNS; for a file or a pipe it assumes only 80.
    is_known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_known else 160)
