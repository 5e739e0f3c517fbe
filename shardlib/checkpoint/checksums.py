"""Sizes and checksums of checkpoint files, computed by the writer and verified later."""

import dataclasses
import errno
import os
import pathlib
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from shardlib.checkpoint.errors import DamageError

_BLOCK_BYTES = 2**20
_PART_BYTES = 2**26
_THREADS = 4
_POLYNOMIAL = 0xEDB88320
# Metadata and other files of at most this size are verified before anything parses them.
SMALL_FILE_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size and CRC-32 (zlib's, 8 hex digits) of one file."""

    bytes: int
    crc32: str


def sync(path: pathlib.Path) -> None:
    """Flushes a file, or the names in a directory, to survive a power loss.

    It does nothing if the file system does not support this.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def checksums(root: pathlib.Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Returns the records of files below `root`; parts of them are read in parallel."""
    names = list(names)
    parts = [
        (name, start)
        for name in names
        for start in range(0, max(1, (root / name).stat().st_size), _PART_BYTES)
    ]
    records: dict[str, tuple[int, int]] = dict.fromkeys(names, (0, 0))

    def checksum(part: tuple[str, int]) -> tuple[int, int]:
        return _checksum_of_part(root / part[0], part[1])

    with ThreadPoolExecutor(_THREADS) as pool:
        for (name, _), (length, crc) in zip(parts, pool.map(checksum, parts), strict=True):
            so_far, before = records[name]
            records[name] = (so_far + length, combined(before, crc, length))
    return {name: FileRecord(length, f"{crc:08x}") for name, (length, crc) in records.items()}


def _checksum_of_part(path: pathlib.Path, start: int) -> tuple[int, int]:
    """Returns the length and CRC-32 of a part of a file."""
    length, crc = 0, 0
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while block := file.read(min(_BLOCK_BYTES, _PART_BYTES - length)):
            length += len(block)
            crc = zlib.crc32(block, crc)
    return length, crc


def combined(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC-32 of two concatenated pieces from their CRC-32s.

    Each appended byte multiplies the polynomial of the first CRC by x^8.

    Source: Adler, zlib, `crc32_combine`, https://zlib.net (crc32.c).
    """
    return _times(_power_of_x(8 * second_bytes), first) ^ second


def _times(a: int, b: int) -> int:
    """Multiplies polynomials over GF(2) modulo the CRC-32 polynomial; the top bit is x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power_of_x(exponent: int) -> int:
    power, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power


def walk(root: pathlib.Path, below: str = "") -> dict[str, os.stat_result]:
    """Returns the files below a directory by relative path, without following links.

    Links and other special files are included; directories are not.
    """
    files: dict[str, os.stat_result] = {}
    with os.scandir(root / below) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                files |= walk(root, name)
            else:
                files[name] = entry.stat(follow_symlinks=False)
    return files


def check_sizes(directory: pathlib.Path, expected: Mapping[str, FileRecord]) -> None:
    """Rejects a checkpoint with missing files or files of another size, without reading them.

    Raises:
        DamageError: If there are such files; all are listed.
    """
    files = walk(directory)
    sizes = {name: file.st_size for name, file in files.items() if stat.S_ISREG(file.st_mode)}
    faults = [
        f"{name}: {sizes[name]} bytes instead of {record.bytes}"
        if name in sizes
        else f"{name}: missing"
        for name, record in sorted(expected.items())
        if sizes.get(name) != record.bytes
    ]
    _raise(directory, faults)


def check_contents(
    directory: pathlib.Path,
    expected: Mapping[str, FileRecord],
    *,
    largest: int | None = None,
) -> None:
    """Rejects a checkpoint whose files differ from their checksums. Files of more than `largest`
    bytes are not read; None reads all.

    Raises:
        DamageError: If files are missing or changed; all are listed.
    """
    check_sizes(directory, expected)
    names = [name for name, r in expected.items() if largest is None or r.bytes <= largest]
    try:
        actual = checksums(directory, names)
    except OSError:
        _raise(
            directory, [fault for name in sorted(names) for fault in _unreadable(directory, name)]
        )
        raise
    _raise(
        directory,
        [f"{name}: checksum mismatch" for name in sorted(names) if actual[name] != expected[name]],
    )


def _unreadable(directory: pathlib.Path, name: str) -> list[str]:
    try:
        checksums(directory, [name])
    except OSError as error:
        return [f"{name}: cannot be read: {error.strerror}"]
    return []


def _raise(directory: pathlib.Path, faults: list[str]) -> None:
    if faults:
        raise DamageError(
            f"checkpoint {directory} is damaged: {len(faults)} of its files are not as saved:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "  Restore another step."
        )
