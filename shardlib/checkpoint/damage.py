"""What is told of checkpoints that are there and cannot be trusted."""

import re
from collections.abc import Sequence

from shardlib.errors import CheckpointError


class DamageError(CheckpointError):
    """A checkpoint is damaged: files are missing or changed, or values are not what was saved."""


def first_line(error: BaseException) -> str:
    """Returns the kind and the first line of an error that may fill a page."""
    line = str(error).strip().partition("\n")[0]
    # TensorStore adds the spec of each driver that an error has passed through.
    line = re.sub(r" \[(os_error_code|source locations|tensorstore_spec)=.*", "", line)
    return f"{type(error).__name__}: {line}"


def listed(steps: Sequence[int], without: int | None = None) -> str:
    """Returns steps as text, `none` without any."""
    return ", ".join(str(step) for step in steps if step != without) or "none"
