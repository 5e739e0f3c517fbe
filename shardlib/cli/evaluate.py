"""`shardlib evaluate`: metrics of a checkpoint, or of tasks."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardlib.cli.arguments import AsJson, Mesh, warn
from shardlib.cli.checkpoint import one_step
from shardlib.errors import ConfigError
from shardlib.tables import aligned

if TYPE_CHECKING:
    from shardlib.evaluation import TaskScores


Source = Annotated[
    str,
    typer.Argument(
        metavar="RUN[@STEP]",
        help="Directory of a run, or of one checkpoint; with --tasks also a Hugging Face folder or "
        "name.",
    ),
]
Tasks = Annotated[
    str | None, typer.Option(metavar="NAME,...", help="Tasks of lm-eval-harness (extra eval).")
]


def evaluate(
    source: Source,
    tasks: Tasks = None,
    include_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder of tasks of your own, as YAML.")
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples before each question of a task.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of questions of each task.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of rows computed at once; default: 32."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put questions into the chat template of the model.")
    ] = False,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Let tasks run the code that the model writes.")
    ] = False,
    mesh: Mesh = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a checkpoint on its held-out data, or on tasks.

    Without --tasks the metrics are those that the run reports, and the perplexity.
    """
    from shardlib.run import evaluating
    from shardlib.runtime.stopping import process_index

    name, step = one_step(source, None)
    if tasks is None:
        _refuse_options(
            {
                "--include-path": include_path,
                "--num-fewshot": num_fewshot,
                "--limit": limit,
                "--rows": rows,
                "--chat": chat or None,
                "--unsafe-code": unsafe_code or None,
            }
        )
        found: dict[str, Any] = evaluating.evaluate_run(name, mesh=mesh, step=step, notify=warn)
        table = [("metric", "value"), *((k, f"{v:.4f}") for k, v in sorted(found.items()))]
    else:
        from shardlib.evaluation import find_tasks, run_tasks

        chosen = [task.strip() for task in tasks.split(",") if task.strip()]
        known = find_tasks(chosen, include_path=include_path)
        model = evaluating.text_model(name, mesh=mesh, step=step, rows=rows or 32, notify=warn)
        options = {"num_fewshot": num_fewshot, "limit": limit}
        scores = run_tasks(model, known, chat=chat, unsafe_code=unsafe_code, **options)
        found = {task: dataclasses.asdict(one) for task, one in scores.items()}
        table = [("task", "metric", "value", "stderr"), *_rows_of(scores)]
    if process_index() == 0:
        print(json.dumps(found, indent=2) if as_json else "\n".join(aligned(table)))


def _refuse_options(given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for options of tasks that are given without tasks."""
    if useless := [name for name, value in given.items() if value is not None]:
        raise ConfigError(f"{', '.join(useless)} needs --tasks.\n  Name tasks, or leave it out.")


def _rows_of(scores: Mapping[str, "TaskScores"]) -> Iterator[tuple[str, str, str, str]]:
    for task, one in scores.items():
        for name, value in one.metrics.items():
            stderr = one.stderrs.get(name)
            yield task, name, f"{value:.4f}", "" if stderr is None else f"{stderr:.4f}"
