"""What the commands share: arguments, and how a config is read and a report printed."""

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
        metavar="[KEY=VALUE]...",
        help="Keys to change, such as train.steps=100 or mesh=fsdp=4,tensor=2.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load_config(path: str, overrides: list[str] | None) -> Any:
    """Returns the config of a run, before what runs it is imported: its faults come sooner.

    That of a run's directory, by its name or by its config.yaml, is for the run there, wherever it
    was before, unless an override says run_dir.
    """
    from shardlib.config import load
    from shardlib.run.config import RunConfig
    from shardlib.run.directory import RunDirectory

    here = RunDirectory(path if os.path.isdir(path) else os.path.dirname(path))
    file = str(here.config_file) if os.path.isdir(path) and here.config_file.is_file() else path
    config = load(RunConfig, file, overrides or ())
    is_of_run = pathlib.Path(file) == here.config_file and here.identity is not None
    is_said = any(word.partition("=")[0].strip() == "run_dir" for word in overrides or ())
    return dataclasses.replace(config, run_dir=str(here)) if is_of_run and not is_said else config


def check_named(path: str, overrides: list[str] | None, run_dir: str) -> None:
    """Refuses to train in another directory than that of the run that was named.

    Raises:
        ConfigError: If `path` names a run, by its directory or its config.yaml, which has no valid
            id and whose config gives another run_dir: it may be a copy of that one.
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
        f"{here.config_file} gives run_dir {run_dir}, which is not the directory that it lies in, "
        f"and there is no valid {here.identity_file.name} beside it.\n"
        f"  Add run_dir={here} to train what is here, or run_dir={run_dir} to train that."
    )


def check_writable(option: str, path: str) -> None:
    """Raises before anything is computed where a file could not be written in the end.

    Raises:
        ConfigError: If it is a directory, or its directory is absent or not to be written to.
    """
    directory = os.path.dirname(path) or "."
    fault = ""
    if os.path.isdir(path):
        fault = "it is a directory"
    elif not os.path.isdir(directory):
        fault = f"there is no directory {directory}"
    elif not os.access(path if os.path.exists(path) else directory, os.W_OK):
        fault = "permission denied"
    if fault:
        raise ConfigError(f"{option} {path} cannot be written: {fault}.\n  Name another file.")


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Names the file where the system refuses to write it.

    Raises:
        ConfigError: If it does.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}.\n  Name another file."
        ) from None


def console() -> Any:
    from rich.console import Console

    # Rich takes a file or a pipe for 80 columns wide, which folds tables beyond reading.
    return Console(width=None if sys.stdout.isatty() else 160)
