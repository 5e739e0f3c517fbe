"""Documents from files: plain text, JSONL, directories, globs and the embedded corpus."""

import glob
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shardlib.data import records
from shardlib.data.config import as_paths
from shardlib.data.corpus import BUILTIN, builtin_files
from shardlib.data.hashing import digest
from shardlib.data.missing import missing
from shardlib.data.text.fields import TextFields
from shardlib.errors import DataError

# Suffixes of the files read from a directory; a glob accepts any file.
DIRECTORY_SUFFIXES = (".txt", ".md", ".jsonl", ".txt.gz", ".md.gz", ".jsonl.gz")
_CHUNK_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class TextSource:
    """The documents of one path, in a fixed order. Empty documents are dropped."""

    path: str
    """The path as written in the config."""
    files: tuple[Path, ...]
    text_field: str
    separator: str | None

    def key(self) -> str:
        """Returns a digest of the files (name, size, modification time) and the options.

        The files are not read, so a run with cached tokens starts at once.
        """
        stats = [(os.path.abspath(file), file.stat()) for file in self.files]
        files = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        return digest((files, self.text_field, self.separator))

    def documents(self) -> Iterator[str]:
        """Yields the documents.

        Raises:
            DataError: If a file is not UTF-8 or cannot be decompressed, or a line of a JSONL file
                holds no text.
        """
        for file in self.files:
            is_jsonl = file.name.removesuffix(".gz").endswith(".jsonl")
            texts = self._jsonl(file) if is_jsonl else self._plain(file)
            yield from filter(None, texts)

    def _plain(self, file: Path) -> Iterator[str]:
        # newline="" keeps line ends, so that bytes are counted as on disk.
        with io.TextIOWrapper(records.opened(file), encoding="utf-8", newline="") as stream:
            try:
                if self.separator is None:
                    yield stream.read()
                else:
                    yield from _separated(stream, self.separator)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file} is not UTF-8 text: {error.reason} "
                    f"(byte 0x{error.object[error.start]:02x}).\n"
                    f"  Convert it to UTF-8, or leave it out of data.path."
                ) from None

    def _jsonl(self, file: Path) -> Iterator[str]:
        form = f'{{"{self.text_field}": "..."}}'
        fix = "Set data.text_field to the field that holds the text."
        for number, record in enumerate(records.json_lines(file, form), 1):
            if record is None:
                continue
            try:
                text = records.text(record, self.text_field, fix)
                text.encode()
            except DataError as fault:
                raise DataError(f"{file}:{number}: {fault}") from None
            except UnicodeEncodeError:
                raise DataError(
                    f"{file}:{number}: the field {self.text_field!r} holds half of a surrogate "
                    "pair, which is not valid Unicode.\n  Repair or remove the line."
                ) from None
            yield text


def open_sources(config: TextFields, paths: str | tuple[str, ...], key: str) -> list[TextSource]:
    """Returns the text source of each path. `key` is the config key of the paths, for messages.

    Raises:
        DataError: If a path does not exist, holds no text file, or is not a known built-in corpus.
            The message lists all such paths.
    """
    sources, faults = [], []
    for path in as_paths(paths):
        try:
            files = tuple(_files(path))
        except DataError as fault:
            faults.append(f"{key}: {fault}")
        else:
            sources.append(TextSource(path, files, config.text_field, config.separator))
    if faults:
        raise DataError("\n".join(faults))
    return sources


def check_exist(path: str | tuple[str, ...], eval_path: str | tuple[str, ...] | None) -> None:
    """Raises `DataError` with every path or pattern at which there is nothing."""
    places = {"data.path": as_paths(path), "data.eval_path": as_paths(eval_path or ())}
    faults = [
        f"{key}: {missing(place)}"
        for key, named in places.items()
        for place in named
        if not place.startswith(BUILTIN)
        and not glob.glob(os.path.expanduser(place), recursive=True)
    ]
    if faults:
        raise DataError("\n".join(faults))


def _files(path: str) -> list[Path]:
    if path.startswith(BUILTIN):
        return builtin_files(path)
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if place.is_dir():
        return _directory_files(place)
    if glob.has_magic(path):
        matches = sorted(map(Path, glob.glob(str(place), recursive=True)))
        files = [file for file in matches if file.is_file()]
        if not files:
            raise DataError(f"no file matches {path!r}.\n  Correct the pattern, or add files.")
        return files
    raise missing(path)


def _directory_files(place: Path) -> list[Path]:
    below = [file for file in place.rglob("*") if not _is_hidden(file.relative_to(place))]
    everything = sorted(file for file in below if file.is_file())
    files = [file for file in everything if file.name.endswith(DIRECTORY_SUFFIXES)]
    if not files:
        suffixes = sorted({file.suffix for file in everything if file.suffix})
        others = f"only {', '.join(suffixes)} files" if suffixes else "only files without a suffix"
        content = others if everything else "no file"
        example = place / "**" / f"*{suffixes[0] if suffixes else '.txt'}"
        raise DataError(
            f"the directory {str(place)!r} holds {content}; expected "
            f"{', '.join(DIRECTORY_SUFFIXES)}.\n"
            f"  Name the files by a glob, such as {str(example)!r}."
        )
    return files


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def _separated(stream: IO[str], separator: str) -> Iterator[str]:
    rest = ""
    while chunk := stream.read(_CHUNK_CHARACTERS):
        *whole, rest = (rest + chunk).split(separator)
        yield from whole
    yield rest
