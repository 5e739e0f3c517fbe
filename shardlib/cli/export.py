"""`shardlib export`: the model of a run as a folder of Hugging Face."""

from typing import Annotated

import typer

from shardlib.cli.arguments import warn
from shardlib.cli.checkpoint import RunAtStep, one_step


def export(
    run: RunAtStep,
    out: Annotated[
        str, typer.Option(metavar="FOLDER", help="The folder: it does not exist or is empty.")
    ],
    architecture: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Its architecture, such as LlamaForCausalLM; default: the first that fits.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh; default: the run's mesh if it fits the devices, else auto."),
    ] = None,
) -> None:
    """Export the model of a run for the transformers library.

    The folder gets safetensors files, config.json and the tokenizer.
    """
    from shardlib.run.exporting import export as run_export

    name, step = one_step(run, None)
    step = run_export(name, out, architecture=architecture, mesh=mesh, step=step, notify=warn)
    print(f"exported step {step} of {name} to {out}")
