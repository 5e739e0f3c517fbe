"""The files of a checkpoint: sizes and checksums, taken by who wrote them and proved later."""

import dataclasses
import os
import pathlib
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from shardlib.checkpoint.damage import DamageError

_BLOCK_BYTES = 2**20
_THREADS = 4
# Metadata, and whatever else is this small, is proved before anything parses it.
SMALL_FILE_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size and CRC-32 (of zlib, 8 hex digits) of one file."""

    bytes: int
    crc32: str


def checksum(path: pathlib.Path) -> FileRecord:
    """Returns the record of one file."""
    total, crc = 0, 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            total += len(block)
            crc = zlib.crc32(block, crc)
    return FileRecord(total, f"{crc:08x}")


def checksums(root: pathlib.Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Returns the records of files below `root`, several read at a time."""
    names = list(names)
    with ThreadPoolExecutor(_THREADS) as pool:
        records = pool.map(checksum, [root / name for name in names])
        return dict(zip(names, records, strict=True))


def walk(root: pathlib.Path, below: str = "") -> dict[str, os.stat_result]:
    """Returns what lies below a directory by relative path; links are not followed.

    Directories are not among it; links and other special files are.
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
    """Refuses a checkpoint with files that are missing or of another size; reads none of them.

    Raises:
        DamageError: Names all such files.
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
    """Refuses a checkpoint with files that were changed, by their checksums.

    Args:
        directory: The checkpoint.
        expected: The records of its manifest.
        largest: Reads only files up to this size; all, when left out.

    Raises:
        DamageError: Names all such files, and those that are missing or of another size.
    """
    check_sizes(directory, expected)
    names = [name for name, r in expected.items() if largest is None or r.bytes <= largest]
    found = checksums(directory, names)
    faults = [f"{name}: other contents" for name in sorted(names) if found[name] != expected[name]]
    _raise(directory, faults)


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
