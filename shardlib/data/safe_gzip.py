"""Safe reading of gzip files, which may be damaged or decompression bombs."""

import gzip
import io
import os
import zlib
from pathlib import Path
from typing import Any

from shardlib.errors import DataError

MOST_TIMES = 200
"""Maximum ratio of decompressed to compressed size: English text reaches about 3, logs 20, and
decompression bombs 1,000, which is the limit of the format."""
MOST_BYTES_UNASKED = 1 << 26
"""Decompressed size in bytes that is allowed for any file, however small."""


class Gunzipped(io.RawIOBase):
    """The content of a gzip file.

    Raises:
        DataError: While reading, if the file is damaged or decompresses to more than text can. The
            declared size does not help: it is modulo 4 GiB, and the writer can set it freely.
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
                f"too large for text.\n"
                f"  Remove the file or, if it is valid, decompress it."
            )
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
