"""Shared parts of the commands: arguments, config loading and report output."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from shardlib.errors import ConfigError
from shardlib.tables import fitted

if TYPE_CHECKING:
    from rich.console import Console

    from shardlib.run.config import RunConfig

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
Mesh = Annotated[
    str | None,
    typer.Option(help="Mesh; default: the run's mesh if it fits the devices, else auto."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Command(TyperCommand):
    """A command whose usage line has no braces around required arguments."""

    def collect_usage_pieces(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Returns the arguments of the usage line."""
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]


class ConfigCommand(Command):
    """A command with a config: an unknown option that names a key is told to be written as one."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parses the words of the command."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # Its class lies elsewhere in each Typer.
            option = getattr(error, "option_name", "")
            if setting := _as_setting(option, words):
                error.message = f"No such option: {option}. Write {setting}."  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


class CommandWithKeys(ConfigCommand):
    """A command whose `--help` ends with every key of the config."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Writes the help of the command, then the keys."""
        from shardlib.run.config import RunConfig

        super().format_help(ctx, formatter)
        formatter.write("\n" + keys_text(RunConfig, formatter.width))


def keys_text(cls: type, width: int) -> str:
    """Returns every key of a configclass with its type, default and meaning, one block per key.

    Keys that are the same under several choices are one block.
    """
    from shardlib.config import keys

    same: dict[tuple[str, str, str, str], list[str]] = {}
    for key in keys(cls):
        default = "required" if key.required else f"default {key.default_text}"
        same.setdefault((key.path, key.type_text, default, key.doc), []).append(key.when)
    lines = ["Keys of the config (type, default, condition, meaning):"]
    for (path, type_text, default, doc), choices in same.items():
        when = f", with {_any_of(choices)}" if any(choices) else ""
        lines += ["", f"  {path}  {type_text}, {default}{when}"]
        lines += textwrap.wrap(doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def _any_of(choices: list[str]) -> str:
    """Returns conditions joined by "or": `name=a|b` if they are values of one key."""
    pairs = [choice.partition("=") for choice in choices]
    if len({key for key, _, _ in pairs}) > 1 or any("," in choice for choice in choices):
        return " or ".join(choices)
    return f"{pairs[0][0]}={'|'.join(value for _, _, value in pairs)}"


def _as_setting(option: str, words: list[str]) -> str:
    """Returns an unknown option as `key.path=value`, or an empty text if it names no key."""
    from shardlib.config import keys
    from shardlib.run.config import RunConfig

    name = option.removeprefix("--").replace("-", "_")
    paths = [key.path for key in keys(RunConfig)]
    matching = [path for path in paths if name and name in (path, path.rpartition(".")[2])]
    if not matching:
        return ""
    word = next(word for word in words if word.partition("=")[0] == option)
    value = word.partition("=")[2] or next(iter(words[words.index(word) + 1 :]), "VALUE")
    return f"{matching[0]}={value}"


def load_config(path: str, overrides: list[str] | None) -> "RunConfig":
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
    if os.path.isdir(path) and not here.config_file.is_file():
        here.config_of_run()  # Raises: the directory holds no run.
    file = str(here.config_file) if os.path.isdir(path) else path
    config = load(RunConfig, file, overrides or ())
    is_of_run = pathlib.Path(file) == here.config_file and here.identity is not None
    is_moved = is_of_run and not _names_run_dir(overrides)
    return dataclasses.replace(config, run_dir=str(here)) if is_moved else config


def _names_run_dir(overrides: list[str] | None) -> bool:
    return any(word.partition("=")[0].strip() == "run_dir" for word in overrides or ())


def check_named(path: str, overrides: list[str] | None, run_dir: str) -> None:
    """Refuses to train in another directory than the directory of the named run.

    Raises:
        ConfigError: If `path` names a run, by its directory or its config.yaml, that has no valid
            id, and its config gives another run_dir: the run may be a copy.
    """
    from shardlib.run.directory import RunDirectory

    here = RunDirectory(path if os.path.isdir(path) else os.path.dirname(path))
    is_run = os.path.isdir(path) or (
        pathlib.Path(path) == here.config_file and here.checkpoints.is_dir()
    )
    is_same = os.path.realpath(run_dir) == os.path.realpath(here.path)
    if is_same or not is_run or _names_run_dir(overrides):
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


def warn(text: str) -> None:
    """Prints a line to standard error."""
    print(text, file=sys.stderr)


def console() -> "Console":
    from rich.console import Console

    # Rich takes the width of a terminal, then COLUMNS; for a file or a pipe it assumes only 80.
    columns = os.environ.get("COLUMNS")
    is_known = columns != "0" and (sys.stdout.isatty() or bool(columns))
    return Console(width=None if is_known else 160)


def say(text: str) -> None:
    """Prints a text, whose longer lines are folded at the width of the terminal."""
    print(fitted(text, console().width))


def show(report: Any, as_json: bool) -> None:
    """Prints a report."""
    if as_json:
        print(json.dumps(report.to_dict(), indent=2, allow_nan=False))
    else:
        console().print(report.render())
