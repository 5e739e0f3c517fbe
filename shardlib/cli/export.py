"""`shardlib export`: the model of a run as a Hugging Face folder."""

from typing import Annotated

import typer

from shardlib.cli.arguments import Mesh, warn
from shardlib.cli.checkpoint import RunAtStep, one_step


def export(
    run: RunAtStep,
    out: Annotated[str, typer.Option(metavar="FOLDER", help="A folder that is new or empty.")],
    architecture: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Class of the model, such as LlamaForCausalLM; default: that of model.init_from, "
            "or else the first that fits.",
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Save only the adapters of finetune, in PEFT's format."),
    ] = False,
    mesh: Mesh = None,
) -> None:
    """Export the model of a run for the transformers library.

    The folder gets safetensors files, config.json and the tokenizer. Adapters are merged.
    """
    from shardlib.run.exporting import export as run_export
    from shardlib.runtime.stopping import process_index

    name, step = one_step(run, None)
    options = {"architecture": architecture, "adapter": adapter, "mesh": mesh}
    step = run_export(name, out, step=step, notify=warn, **options)
    if process_index() == 0:
        print(f"exported step {step} of {name} to {out}")
