"""What the compiler writes to the standard error of the process, past Python."""

import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator

# As absl writes them: `W0521 10:00:00.000000 123 file.cc:45] text`.
_LOG_LINE = re.compile(r"[IWEF]\d{4} |WARNING: All log messages before absl")


@dataclasses.dataclass
class Said:
    """What was written to the standard error meanwhile."""

    text: str = ""


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
            said.text = "".join(line for line in lines if _LOG_LINE.match(line))
            for line in lines:
                if not _LOG_LINE.match(line):
                    sys.stderr.write(line)
