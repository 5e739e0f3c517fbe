"""`shardlib explain --serve`."""

import json
import os
from typing import Annotated, Any

import typer

from shardlib.cli.arguments import console
from shardlib.cli.plan_serving import named
from shardlib.errors import ConfigError

Serve = Annotated[
    bool,
    typer.Option(
        "--serve",
        help="Explain how an engine serves CONFIG, which may also be a name such as llama3-8b or a "
        "folder with a config.json: memory, slots, context, times. With --on.",
    ),
]
ServeMesh = Annotated[
    str | None, typer.Option("--mesh", help="With --serve: mesh; default: the best one.")
]
ServeSlots = Annotated[
    int | None,
    typer.Option("--slots", min=1, help="With --serve: sequences; default: the best number."),
]
ServeChunk = Annotated[
    int | None,
    typer.Option(
        "--chunk", min=1, help="With --serve: prompt tokens of a step; default: the best number."
    ),
]


def explain_serving(
    model: str, on: str | None, options: dict[str, Any], others: dict[str, Any], as_json: bool
) -> bool:
    """Prints the report on an engine; returns whether it fits.

    Raises:
        ConfigError: If no cluster is given, or an option explains training.
    """
    if given := [name for name, value in others.items() if value]:
        raise ConfigError(
            f"--serve explains how to serve a model, and {', '.join(given)} how to train one.\n"
            "  Leave one of them out."
        )
    if on is None:
        raise ConfigError("--serve needs a cluster.\n  Name one, as in --on v5e-8.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from shardlib.run.reports.explaining_serving import explain_serving as run_explain

    chosen = {name: value for name, value in options.items() if value is not None}
    report = run_explain(named(model), on=on, **chosen)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        console().print(report.render())
    return report.fits
