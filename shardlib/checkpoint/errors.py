"""Errors about damaged checkpoints, and their texts."""

import re
from collections.abc import Sequence

from shardlib.errors import CheckpointError


class DamageError(CheckpointError):
    """A checkpoint is damaged: files are missing or changed, or values differ from the save."""


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error, whose text may be long."""
    line = str(error).strip().partition("\n")[0]
    # TensorStore appends the spec of each driver that an error passes through.
    line = re.sub(r" \[(os_error_code|source locations|tensorstore_spec)=.*", "", line)
    return f"{type(error).__name__}: {line}"


def listed(steps: Sequence[int], without: int | None = None) -> str:
    """Returns the steps as text except `without`; `none` if the list is empty."""
    return ", ".join(str(step) for step in steps if step != without) or "none"
