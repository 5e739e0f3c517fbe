"""What the compiler writes to the standard error of the process, past Python."""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# XLA reads it once, when it is loaded. From 2 on it keeps warnings to itself.
_LEVEL = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
_HIDES_WARNINGS = _LEVEL.isdigit() and int(_LEVEL) >= 2
HIDDEN = (
    "what the compiler warns of is not known, such as full rematerialization (SL104): "
    "TF_CPP_MIN_LOG_LEVEL of 2 and more hides it, set it to 1"
)
"""What a report says where warnings are hidden."""
# As absl writes them: `W0521 10:00:00.000000 123 file.cc:45] text`.
_LOG_LINE = re.compile(r"[IWEF]\d{4} |WARNING: All log messages before absl")


@dataclasses.dataclass
class Said:
    """What was written to the standard error meanwhile; None where that cannot be known: where
    there is no standard error, or where TF_CPP_MIN_LOG_LEVEL hides warnings."""

    text: str | None = None


@contextlib.contextmanager
def captured_errors() -> Iterator[Said]:
    """Gathers what C++ logs to the standard error; what others write there goes on to it."""
    said = Said()
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):  # There is no standard error.
        yield said
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield said
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
            if not _HIDES_WARNINGS:
                said.text = "".join(line for line in lines if _LOG_LINE.match(line))
            for line in lines:
                if not _LOG_LINE.match(line):
                    sys.stderr.write(line)
