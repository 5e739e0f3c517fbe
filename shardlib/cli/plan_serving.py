"""`shardlib plan --serve`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shardlib.cli.arguments import load_config, show
from shardlib.errors import ConfigError

Serve = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Plan how to serve a model: llama3-8b, a folder with a config.json, a config or a "
        "run's directory.",
    ),
]
Context = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="With --serve: a prompt and its answer. Default 8k."),
]
Prompt = Annotated[
    str | None,
    typer.Option(metavar="TOKENS", help="With --serve: a prompt. Default: half of the context."),
]
Slo = Annotated[
    str | None,
    typer.Option(
        metavar="TIMES",
        help="With --serve: seconds to the first token, and between tokens: ttft=1s,itl=50ms.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="int8", help="With --serve: kernels of layers in 8 bits."),
]
Cache = Annotated[
    str | None, typer.Option(metavar="int8", help="With --serve: keys and values in 8 bits.")
]


def plan_serving(
    model: str, on: str, options: dict[str, Any], others: dict[str, Any], *, as_json: bool
) -> None:
    """Prints plans to serve a model, the value of --serve; the rest is as in `arguments_of`."""
    chosen = arguments_of(options, others, "plans")
    from shardlib.plan.serving import plan_serving as make_plans

    show(make_plans(named(model), on=on, **chosen), as_json)


def arguments_of(options: dict[str, Any], others: dict[str, Any], verb: str) -> dict[str, Any]:
    """Returns the options about serving that are given (not None), before a model is traced.

    `others` are options about training, by name; `verb` is what the command does.

    Raises:
        ConfigError: If an option about training is given.
    """
    if given := [name for name, value in others.items() if value]:
        raise ConfigError(
            f"--serve {verb} how to serve a model, and {', '.join(given)} how to train one.\n"
            "  Leave one of them out."
        )
    # Tracing a model does not use the devices of this machine.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return {name: value for name, value in options.items() if value is not None}


def named(model: str) -> Any:
    """Returns the config of a run, if the text names one; otherwise the text."""
    path = Path(model)
    is_folder = path.is_dir() and not (path / "config.json").exists()
    return load_config(model, None) if is_folder or path.suffix in (".yaml", ".yml") else model


def check_without_serving(of_serving: dict[str, Any], verb: str, add: str) -> None:
    """Raises `ConfigError` for options of serving without --serve; `add` is what to add."""
    if given := [f"--{name}" for name, value in of_serving.items() if value is not None]:
        is_one = len(given) == 1
        raise ConfigError(
            f"{', '.join(given)} {verb if is_one else verb.removesuffix('s')} how to serve a model."
            f"\n  Add {add}, or leave {'it' if is_one else 'them'} out."
        )
