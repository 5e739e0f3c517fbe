"""Capture of compiler logs that C++ writes to the standard error of the process."""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# XLA reads it once, at load time. Values of 2 and above hide warnings.
_LEVEL = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "")
_HIDES_WARNINGS = _LEVEL.isdigit() and int(_LEVEL) >= 2
HIDDEN = (
    "compiler warnings are unknown, such as full rematerialization (SL104): "
    "TF_CPP_MIN_LOG_LEVEL of 2 or more hides them, set it to 1"
)
"""The note in a report if warnings are hidden."""
# The line format of absl: `W0521 10:00:00.000000 123 file.cc:45] text`.
_LOG_LINE = re.compile(r"[IWEF]\d{4} |WARNING: All log messages before absl")


@dataclasses.dataclass
class CapturedLog:
    """The captured log lines; None if unknown.

    They are unknown without a standard error, or if TF_CPP_MIN_LOG_LEVEL hides warnings.
    """

    text: str | None = None


@contextlib.contextmanager
def captured_errors() -> Iterator[CapturedLog]:
    """Captures C++ logs from the standard error; other output is passed on to it."""
    log = CapturedLog()
    try:
        sys.stderr.flush()
        kept = os.dup(2)
    except (OSError, ValueError, AttributeError):  # The process has no standard error.
        yield log
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
            if not _HIDES_WARNINGS:
                log.text = "".join(line for line in lines if _LOG_LINE.match(line))
            for line in lines:
                if not _LOG_LINE.match(line):
                    sys.stderr.write(line)
