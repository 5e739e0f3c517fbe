"""`shardlib import`: a Hugging Face folder as a run."""

from typing import Annotated

import typer

from shardlib.cli.arguments import Overrides


def import_model(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A folder with config.json and safetensors.")
    ],
    out: Annotated[
        str, typer.Option(metavar="RUN", help="Directory of the run; it must not exist yet.")
    ],
    overrides: Overrides = None,
    allow_bin: Annotated[
        bool, typer.Option("--allow-bin", help="Read torch's .bin files, without running them.")
    ] = False,
) -> None:
    """Import published weights as a run with a checkpoint at step 0.

    The run can be sampled, exported and resharded; with data.path it can also be trained.
    """
    from shardlib.config import load
    from shardlib.run.config import RunConfig

    # Quotes keep a name with brackets or braces from being read as YAML.
    source = [f"model.init_from={_quoted(folder)}", f"run_dir={_quoted(out)}"]
    config = load(RunConfig, None, [*(overrides or ()), *source])
    has_data = any(word.startswith("data.path=") for word in overrides or ())
    from shardlib.run.importing import import_model as run_import
    from shardlib.runtime.stopping import process_index

    run_import(config, reads_data=has_data, allow_bin=allow_bin)
    if process_index() == 0:
        print(f"imported {folder} to {out}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
