"""What the commands share: arguments, and how a config is read and a report printed."""

import os
import sys
from typing import Annotated, Any

import typer

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
    """Returns the config of a run, before what runs it is imported: its faults come sooner."""
    from shardlib.config import load
    from shardlib.run.config import RunConfig

    of_run = os.path.join(path, "config.yaml")
    return load(RunConfig, of_run if os.path.isfile(of_run) else path, overrides or ())


def console() -> Any:
    from rich.console import Console

    # Rich takes a file or a pipe for 80 columns wide, which folds tables beyond reading.
    return Console(width=None if sys.stdout.isatty() else 160)
