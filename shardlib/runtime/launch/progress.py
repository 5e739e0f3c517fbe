"""Reports from a run to its launcher: its progress, and its failure.

The reports go to a file named by the variable SHARDLIB_PROGRESS_FILE, since a process that has gone
cannot be asked. Without the variable nothing is written. If the file cannot be written, the run
says so once on standard error and continues. The launcher may then assume less progress than was
saved.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import sys

PROGRESS_VARIABLE = "SHARDLIB_PROGRESS_FILE"
RESTARTS_VARIABLE = "SHARDLIB_RESTARTS"
"""Variable with the launcher's `restarts`, for the command with which the run resumes."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """The last report of a process."""

    saved_step: int | None = None
    failure: tuple[str, int | None] | None = None
    """Kind and step of the failure."""
    rewound_to: int | None = None
    """The step that the run has gone back to; `saved_step` is at least this one."""


def report_progress(saved_step: int) -> None:
    """Reports that all up to a step is saved, so that the next attempt resumes from there.

    The next attempt cannot do so if that checkpoint is damaged, or was on a disk that has gone.
    A run that goes back on purpose calls `report_rewind`.
    """
    _report(saved_step=saved_step)


def report_rewind(step: int) -> None:
    """Reports that the run has dropped all progress after a step (0 for all of it) to retry.

    Later saves count as progress, even at steps that were saved before. The run itself must limit
    the number of its rewinds.
    """
    _report(saved_step=step or None, rewound_to=step)


def report_failure(kind: str, step: int | None = None) -> None:
    """Reports that this process is about to fail, with the step and the kind of failure.

    A second failure of the same kind at the same step counts as deterministic. Report only failures
    that follow from config, data and state alone, such as non-finite values.

    Args:
        kind: Kind of the failure in words: `diverged`.
        step: Step of the failure. None for a failure outside of steps, which counts as repeated if
            nothing new was saved in between.
    """
    _report(failure=(kind, step))


def read_progress(path: str | os.PathLike[str]) -> Progress:
    """Returns the last report of a process; empty if the file is missing or broken."""
    try:
        match json.loads(pathlib.Path(path).read_text()):
            case {
                "saved_step": int() | None as saved_step,
                "failure": None | [str(), int() | None] as failure,
                "rewound_to": int() | None as rewound_to,
            }:
                kind_and_step = tuple(failure) if failure else None
                return Progress(saved_step, kind_and_step, rewound_to)  # type: ignore[arg-type]
    except (OSError, ValueError):
        pass
    return Progress()


def _report(**changes: int | tuple[str, int | None] | None) -> None:
    path = os.environ.get(PROGRESS_VARIABLE)
    if not path:
        return
    progress = dataclasses.replace(read_progress(path), **changes)  # type: ignore[arg-type]
    part = f"{path}.part"
    try:
        pathlib.Path(part).write_text(json.dumps(dataclasses.asdict(progress)))
        os.replace(part, path)
    except OSError as error:
        _warn_once(
            f"{path} cannot be written: {error.strerror}. "
            "The launcher does not know the progress of this run."
        )


@functools.cache
def _warn_once(text: str) -> None:
    with contextlib.suppress(OSError):  # The reader of stderr may have gone.
        print(text, file=sys.stderr, flush=True)
