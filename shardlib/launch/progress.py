"""What a run tells the launcher that started it: how far it is, and how it failed.

By a file, named by the variable SHARDLIB_PROGRESS_FILE: a process that is gone cannot be asked.
Without the variable nothing is written.
"""

import dataclasses
import json
import os
import pathlib

PROGRESS_VARIABLE = "SHARDLIB_PROGRESS_FILE"


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a process has said last."""

    saved_step: int | None = None
    failure: tuple[str, int] | None = None
    """Kind and step."""


def report_progress(saved_step: int) -> None:
    """Says that all up to a step is saved, and would not be lost."""
    _report(saved_step=saved_step)


def report_failure(kind: str, step: int) -> None:
    """Says that this process is about to fail, at which step and of what.

    The same again at the same step counts as bound to happen a third time: report what follows from
    config, data and state alone, such as values that are not finite.
    """
    _report(failure=(kind, step))


def read_progress(path: str | os.PathLike[str]) -> Progress:
    """Returns what a process has said; nothing if it has said nothing."""
    try:
        said = json.loads(pathlib.Path(path).read_text())
    except FileNotFoundError:
        return Progress()
    failure = said["failure"]
    return Progress(said["saved_step"], None if failure is None else (failure[0], failure[1]))


def _report(**said: int | tuple[str, int]) -> None:
    path = os.environ.get(PROGRESS_VARIABLE)
    if not path:
        return
    progress = dataclasses.replace(read_progress(path), **said)  # type: ignore[arg-type]
    part = f"{path}.part"
    pathlib.Path(part).write_text(json.dumps(dataclasses.asdict(progress)))
    os.replace(part, path)
