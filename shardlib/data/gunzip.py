"""Gzip files that are not what they seem: damaged ones, and bombs."""

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any

from shardlib.errors import DataError

MOST_TIMES = 200
"""How much larger than its file text may become: English does about 3 times, logs 20, and what is
made to exhaust a memory 1,000, the most that the format can do."""
MOST_BYTES_UNASKED = 1 << 26
"""What any file may become, however small it is."""


class Gunzipped(io.RawIOBase):
    """The content of a gzip file.

    Args:
        file: The file.

    Raises:
        DataError: From reading, if the file is damaged, or becomes larger than text does. The size
            that the file declares is no help: it is known modulo 4 GiB, to whoever wrote it.
    """

    def __init__(self, file: Path):
        self._file = file
        self._stream = gzip.GzipFile(file)
        self._size = os.path.getsize(file)
        self._most = max(MOST_TIMES * self._size, MOST_BYTES_UNASKED)
        self._seen = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count = self._stream.readinto(buffer)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(
                f"{self._file} cannot be decompressed: {str(error).rstrip('.')}.\n"
                f"  Repair or remove the file."
            ) from None
        self._seen += count
        if self._seen > self._most:
            raise DataError(
                f"{self._file} of {self._size:,} bytes decompresses to more than {self._most:,}, "
                f"as no text does.\n"
                f"  Remove the file or, if it is as it should be, unpack it."
            )
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
