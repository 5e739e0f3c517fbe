"""`shardlib evaluate`: metrics of a checkpoint, or of tasks."""

import json
from typing import Annotated, Any

import typer

from shardlib.cli.arguments import AsJson, warn
from shardlib.cli.checkpoint import one_step
from shardlib.errors import ConfigError
from shardlib.tables import aligned


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]",
            help="Directory of a run, or of one checkpoint; with --tasks also a folder or name of "
            "Hugging Face.",
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Tasks of lm-eval-harness (extra eval)."),
    ] = None,
    include_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder of tasks of your own, as YAML.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of a task.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most questions of each task.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows that tasks compute at once.")] = 32,
    mesh: Annotated[
        str | None,
        typer.Option(help="Mesh; default: the run's mesh if it fits the devices, else auto."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint on its held-out data, or on tasks.

    Without --tasks the metrics are those that the run reports, and the perplexity.
    """
    from shardlib.run import evaluating
    from shardlib.runtime.stopping import process_index

    name, step = one_step(source, None)
    if tasks is None:
        given = {"--include-path": include_path, "--num-fewshot": num_fewshot, "--limit": limit}
        if useless := [name for name, value in given.items() if value is not None]:
            raise ConfigError(
                f"{', '.join(useless)} needs --tasks.\n  Name tasks, or leave it out."
            )
        found: dict[str, Any] = evaluating.evaluate_run(name, mesh=mesh, step=step, notify=warn)
        table = [("metric", "value"), *((k, f"{v:.4f}") for k, v in sorted(found.items()))]
    else:
        from shardlib.evaluation import run_tasks

        model = evaluating.text_model(name, mesh=mesh, step=step, rows=rows, notify=warn)
        chosen = [task.strip() for task in tasks.split(",") if task.strip()]
        options = {"num_fewshot": num_fewshot, "limit": limit, "include_path": include_path}
        found = run_tasks(model, chosen, **options)
        table = [("task", "metric", "value")]
        table += [(task, k, f"{v:.4f}") for task, one in found.items() for k, v in one.items()]
    if process_index() == 0:
        print(json.dumps(found, indent=2) if as_json else "\n".join(aligned(table)))
