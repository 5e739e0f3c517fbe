"""Options of the commands that answer requests: the model, and its engine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.arguments import warn
from shardlib.cli.checkpoint import one_step
from shardlib.errors import ConfigError

if TYPE_CHECKING:
    from shardlib.engine import Engine
    from shardlib.serve.bodies import Speaker

SERVED_HELP = "A run, or a Hugging Face folder or name."

Name = Annotated[
    str | None, typer.Option(help="Name of the model in requests; default: its directory's.")
]
Slots = Annotated[int, typer.Option(min=1, help="Requests that run at once.")]
Context = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Maximum tokens of a prompt and its answer; default: the model's, but at most 4096.",
    ),
]
Pages = Annotated[
    int | None,
    typer.Option(min=1, help="Pages of 16 tokens in the cache; default: enough for full slots."),
]
Chunk = Annotated[
    int, typer.Option(min=1, help="Prompt tokens that a step reads, a multiple of 32.")
]
Speculate = Annotated[
    int,
    typer.Option(
        min=0,
        max=31,
        help="Tokens of a request that are guessed from earlier text and checked in one step; 0 "
        "guesses none.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Make the bits of answers independent of other requests (CPU, float32).",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(metavar="int8", help="Kernels of layers in 8 bits; default: as they are."),
]
Cache = Annotated[
    str | None,
    typer.Option(metavar="int8", help="Keys and values in 8 bits; default: as the model."),
]
Attention = Annotated[
    str,
    typer.Option(
        metavar="auto|xla|cudnn", help="What reads the cache: the platform's own, XLA, or cuDNN."
    ),
]
Pooling = Annotated[
    str | None,
    typer.Option(
        metavar="cls|mean|max",
        help="How an encoder's output becomes an embedding; default: as its folder says, or mean.",
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="A LoRA adapter in the format of PEFT, which requests choose as a model. Repeatable.",
    ),
]


def open_engine(model: str, adapters: list[str] | None, **options: Any) -> "tuple[Engine, Speaker]":
    """Returns the engine of `RUN[@STEP]` or a folder, and the model as it answers."""
    pairs = [one.partition("=") for one in adapters or ()]
    if wrong := [one for one, pair in zip(adapters or (), pairs, strict=True) if not all(pair)]:
        raise ConfigError(
            f"--adapter {' '.join(wrong)} lacks a name or a folder.\n  Write NAME=FOLDER."
        )
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ConfigError(
            f"--adapter {' '.join(adapters or ())} gives a name twice.\n  Rename one of them."
        )
    from shardlib.serve.open_model import open_model

    options["adapters"] = {name: folder for name, _, folder in pairs}
    directory, step = one_step(model, None)
    return open_model(directory, step=step, notify=warn, **options)
