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
    sizes = {name: (root / name).stat().st_size for name in names}
    parts = [
        (root / name, start)
        for name in names
        for start in range(0, max(1, sizes[name]), _PART_BYTES)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = dict(zip(parts, pool.map(_checksum_of_part, parts), strict=True))
    records: dict[str, tuple[int, int]] = {}
    for (path, _), (length, crc) in sums.items():
        name = path.relative_to(root).as_posix()
        so_far, before = records.get(name, (0, 0))
        records[name] = (so_far + length, combined(before, crc, length))
    return {name: FileRecord(length, f"{crc:08x}") for name, (length, crc) in records.items()}


def _checksum_of_part(part: tuple[pathlib.Path, int]) -> tuple[int, int]:
    """Returns the length and CRC-32 of a part of a file, given by its path and start."""
    path, start = part
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
    found: dict[str, os.stat_result] = {}
    with os.scandir(root / below) as entries:
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_dir(follow_symlinks=False):
                found |= walk(root, name)
            else:
                found[name] = entry.stat(follow_symlinks=False)
    return found


def check_sizes(directory: pathlib.Path, expected: Mapping[str, FileRecord]) -> None:
    """Rejects a checkpoint with missing files or files of another size, without reading them.

    Raises:
        DamageError: If there are such files; all are listed.
    """
    found = _regular_files(directory)
    faults = []
    for name, record in sorted(expected.items()):
        if name not in found:
            faults.append(f"{name}: missing")
        elif found[name] != record.bytes:
            faults.append(f"{name}: {found[name]} bytes instead of {record.bytes}")
    _raise(directory, faults)


def check_contents(
    directory: pathlib.Path,
    expected: Mapping[str, FileRecord],
    *,
    largest: int | None = None,
) -> None:
    """Rejects a checkpoint whose files differ from their checksums.

    Args:
        directory: The checkpoint.
        expected: The records of its manifest.
        largest: Size in bytes of the largest file to read; None reads all files.

    Raises:
        DamageError: If files are missing or changed; all are listed.
    """
    check_sizes(directory, expected)
    names = [name for name, r in expected.items() if largest is None or r.bytes <= largest]
    try:
        found = checksums(directory, names)
    except OSError:
        unreadable = [_unreadable(directory, name) for name in sorted(names)]
        _raise(directory, [fault for fault in unreadable if fault])
        raise
    faults = [
        f"{name}: checksum mismatch" for name in sorted(names) if found[name] != expected[name]
    ]
    _raise(directory, faults)


def _unreadable(directory: pathlib.Path, name: str) -> str | None:
    try:
        checksums(directory, [name])
    except OSError as error:
        return f"{name}: cannot be read: {error.strerror}"
    return None


def _regular_files(directory: pathlib.Path) -> dict[str, int]:
    return {
        name: entry.st_size
        for name, entry in walk(directory).items()
        if stat.S_ISREG(entry.st_mode)
    }


def _raise(directory: pathlib.Path, faults: list[str]) -> None:
    if faults:
        raise DamageError(
            f"checkpoint {directory} is damaged: {len(faults)} of its files are not as saved:\n"
            + "".join(f"  {fault}\n" for fault in faults)
            + "  Restore another step."
        )
