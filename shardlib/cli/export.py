"""`shardlib export`: the model of a run as a Hugging Face folder."""

import json
from pathlib import Path
from typing import Annotated

import typer

from shardlib.cli.arguments import Mesh, warn
from shardlib.cli.checkpoint import RunAtStep, one_step
from shardlib.errors import check_run


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
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16 or float16; default: that of the folder of model.init_from, or "
            "else that of the run.",
        ),
    ] = None,
    mesh: Mesh = None,
) -> None:
    """Export the model of a run for the transformers library.

    The folder gets safetensors files, config.json and the tokenizer. Adapters are merged.
    """
    name, step = one_step(run, None)
    check_run(name)
    from shardlib.run.exporting import export as run_export
    from shardlib.runtime.stopping import process_index

    options = {"architecture": architecture, "adapter": adapter, "dtype": dtype}
    step = run_export(name, out, step=step, mesh=mesh, notify=warn, **options)
    if process_index() == 0:
        config = {} if adapter else json.loads((Path(out) / "config.json").read_text())
        # Folders of diffusers do not name it.
        written = f" in {config['torch_dtype']}" if "torch_dtype" in config else ""
        print(f"exported step {step} of {name} to {out}{written}")
