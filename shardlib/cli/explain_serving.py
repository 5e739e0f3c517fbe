"""`shardlib explain --serve`."""

from typing import Annotated, Any

import typer

from shardlib.cli.arguments import show
from shardlib.cli.plan_serving import arguments_of, named
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
    chosen = arguments_of(options, others, "explains")
    if on is None:
        raise ConfigError("--serve needs a cluster.\n  Name one, as in --on v5e-8.")
    from shardlib.run.reports.explaining_serving import explain_serving as run_explain

    report = run_explain(named(model), on=on, **chosen)
    show(report, as_json)
    return report.fits
