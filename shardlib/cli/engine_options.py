"""Options of the commands that answer requests: the model, and its engine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.arguments import warn
from shardlib.cli.checkpoint import one_step

if TYPE_CHECKING:
    from shardlib.engine import Engine
    from shardlib.serve.bodies import Speaker

SERVED_HELP = "A run, or a folder or name of Hugging Face."

Name = Annotated[
    str | None, typer.Option(help="Name of the model in requests; default: its directory's.")
]
Slots = Annotated[int, typer.Option(min=1, help="Requests that run at once.")]
Context = Annotated[int | None, typer.Option(min=2, help="Most tokens of a prompt and its answer.")]
Pages = Annotated[
    int | None, typer.Option(min=1, help="Pages of 16 tokens; default: all slots are full.")
]
Chunk = Annotated[
    int, typer.Option(min=1, help="Tokens of prompts that a step reads, a multiple of 32.")
]
Deterministic = Annotated[
    bool,
    typer.Option("--deterministic", help="Bits do not depend on others (CPU, float32)."),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="int8", help="Kernels of layers in 8 bits; default: as they are."),
]
Cache = Annotated[
    str | None,
    typer.Option(metavar="int8", help="Keys and values in 8 bits; default: as the model."),
]
Mesh = Annotated[
    str | None,
    typer.Option(help="Mesh; default: the run's mesh if it fits the devices, else auto."),
]


def open_engine(model: str, **options: Any) -> "tuple[Engine, Speaker]":
    """Returns the engine of `RUN[@STEP]` or a folder, and the model as it answers."""
    from shardlib.serve.open_model import open_model

    directory, step = one_step(model, None)
    return open_model(directory, step=step, notify=warn, **options)
