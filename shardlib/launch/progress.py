"""What a run tells the launcher that started it: how far it is, and how it failed.

By a file, named by the variable SHARDLIB_PROGRESS_FILE: a process that is gone cannot be asked.
Without the variable nothing is written. Where the file cannot be written, standard error has it
once, and the run goes on: the launcher may then judge it by less than it has saved.
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
"""What the launcher tells the run: its `restarts`, for the command to start it with again."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a process has said last."""

    saved_step: int | None = None
    failure: tuple[str, int | None] | None = None
    """Kind and step."""
    rewound_to: int | None = None
    """The step that the run has gone back to; `saved_step` is at least this one."""


def report_progress(saved_step: int) -> None:
    """Says that all up to a step is saved: the next attempt goes on from there.

    Unless that checkpoint turns out to be damaged, or was on a disk that has gone. Of a run that
    goes back on purpose `report_rewind` tells.
    """
    _report(saved_step=saved_step)


def report_rewind(step: int) -> None:
    """Says that the run has given up all after a step, 0 for all of it, to take another way.

    What is saved later on that way is progress, though other steps were saved before. How often a
    run may go back is for the run to limit.
    """
    _report(saved_step=step or None, rewound_to=step)


def report_failure(kind: str, step: int | None = None) -> None:
    """Says that this process is about to fail, at which step and of what.

    The same again at the same step counts as bound to happen a third time: report what follows from
    config, data and state alone, such as values that are not finite.

    Args:
        kind: What has failed, in words: `diverged`.
        step: Where; None for what has failed at no step, which is the same again if nothing new was
            saved since.
    """
    _report(failure=(kind, step))


def read_progress(path: str | os.PathLike[str]) -> Progress:
    """Returns what a process has said; nothing if there is no such file, or it is broken."""
    try:
        match json.loads(pathlib.Path(path).read_text()):
            case {
                "saved_step": int() | None as saved_step,
                "failure": None,
                "rewound_to": int() | None as rewound_to,
            }:
                return Progress(saved_step, None, rewound_to)
            case {
                "saved_step": int() | None as saved_step,
                "failure": [str(kind), int() | None as step],
                "rewound_to": int() | None as rewound_to,
            }:
                return Progress(saved_step, (kind, step), rewound_to)
    except (OSError, ValueError):
        pass
    return Progress()


def _report(**said: int | tuple[str, int | None] | None) -> None:
    path = os.environ.get(PROGRESS_VARIABLE)
    if not path:
        return
    progress = dataclasses.replace(read_progress(path), **said)  # type: ignore[arg-type]
    part = f"{path}.part"
    try:
        pathlib.Path(part).write_text(json.dumps(dataclasses.asdict(progress)))
        os.replace(part, path)
    except OSError as error:
        _say_once(
            f"{path} cannot be written: {error.strerror}. "
            "The launcher is not told how far this run is."
        )


@functools.cache
def _say_once(text: str) -> None:
    with contextlib.suppress(OSError):  # Nobody listens any more.
        print(text, file=sys.stderr, flush=True)
