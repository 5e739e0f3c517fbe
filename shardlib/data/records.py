"""Examples from files: JSONL, JSON, CSV, Parquet and Arrow."""

import csv
import glob
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from shardlib.data.builtin_examples import builtin_examples
from shardlib.data.corpus import BUILTIN, builtin_files
from shardlib.data.hashing import digest
from shardlib.data.missing import missing
from shardlib.data.safe_gzip import Gunzipped
from shardlib.errors import DataError, did_you_mean, require

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet")
_SHOWN = 5
"""Maximum number of faults in a message."""

Placed = tuple[str, dict[str, Any]]
"""An example with its place, for messages."""
T = TypeVar("T")


class _Tabs(csv.excel_tab):
    quoting = csv.QUOTE_NONE


def read_all(examples: Iterable[Placed], read: Callable[[str, dict[str, Any]], T]) -> list[T]:
    """Returns `read(place, example)` of each example.

    Raises:
        DataError: If `read` raises it for some examples. The message names the places of the first
            few, and their number.
    """
    found, faults, count = [], [], 0
    for where, example in examples:
        count += 1
        try:
            found.append(read(where, example))
        except DataError as fault:
            faults.append((where, str(fault)))
    raise_faults(faults, count)
    return found


def raise_faults(faults: list[tuple[str, str]], count: int) -> None:
    """Raises `DataError` with the first few faults of examples, if there are any. Each fault has
    the place of its example; its second line is the fix. `count` is of all examples."""
    if not faults:
        return
    shown = [(where, *fault.partition("\n  ")[::2]) for where, fault in faults[:_SHOWN]]
    lines = [f"{where}: {text}" for where, text, _ in shown]
    if len(faults) > _SHOWN:
        lines.append(f"and {len(faults) - _SHOWN:,} more.")
    if len(faults) > 1:
        lines.insert(0, f"{len(faults):,} of {count:,} examples have faults:")
    fixes = dict.fromkeys(fix for _, _, fix in shown if fix)
    raise DataError("\n  ".join([*lines, *fixes]))


def field(example: Mapping[str, Any], name: str, fix: str) -> Any:
    """Returns a field of an example; raises `DataError` with the fix if there is no such field."""
    if name not in example:
        fields = ", ".join(map(repr, example)) or "none"
        raise DataError(
            f"no field {name!r}; its fields: {fields}.{did_you_mean(name, example)}\n  {fix}"
        )
    return example[name]


def text(example: Mapping[str, Any], name: str, fix: str) -> str:
    """Returns a field of text; raises `DataError` with the fix if it is not one."""
    value = field(example, name, fix)
    if not isinstance(value, str):
        raise DataError(f"the field {name!r} holds {type(value).__name__}, not text.\n  {fix}")
    return value


def examples(path: str) -> Iterator[Placed]:
    """Yields each example of a path with its place, for messages.

    Raises:
        DataError: If the path does not exist or holds something else.
        MissingExtraError: If the file is Parquet or Arrow and `pyarrow` is not installed.
    """
    if path.startswith(BUILTIN):
        for number, example in enumerate(builtin_examples(path)):
            yield f"{path}:{number}", example
        return
    for file in _files(path):
        for number, example in enumerate(_rows(file), 1):
            if example is not None:
                yield f"{file}:{number}", example


def key(path: str) -> str:
    """Returns a digest of the files of a path (name, size, modification time), unread."""
    files = builtin_files("builtin:python") if path.startswith(BUILTIN) else _files(path)
    stats = [(os.path.abspath(file), file.stat()) for file in files]
    return digest((path, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)))


def _files(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if glob.has_magic(path):
        files = sorted(map(Path, glob.glob(str(place), recursive=True)))
        if files and all(file.name.endswith(_SUFFIXES) for file in files):
            return files
        raise DataError(
            f"{path!r} matches {len(files)} files, and not examples alone.\n"
            f"  Give a pattern of {', '.join(_SUFFIXES)} files, such as data/train-*.parquet."
        )
    if place.is_file() and place.name.endswith(_SUFFIXES):
        return [place]
    if (place / "state.json").is_file():
        state = json.loads((place / "state.json").read_text())
        return [place / entry["filename"] for entry in state["_data_files"]]
    if not place.exists():
        raise missing(path)
    kinds = ", ".join(_SUFFIXES)
    action = f"Give a {kinds} file, a pattern of them, or a folder that save_to_disk wrote."
    if (place / "dataset_dict.json").is_file():
        splits = json.loads((place / "dataset_dict.json").read_text())["splits"]
        action = f"Give the folder of one split: {', '.join(str(place / name) for name in splits)}."
    raise DataError(f"{path!r} is not a set of examples.\n  {action}")


def _rows(file: Path) -> Iterator[dict[str, Any] | None]:
    if ".jsonl" in file.suffixes:
        return json_lines(file)
    if file.suffix == ".json":
        return _json(file)
    return _separated(file) if file.suffix in (".csv", ".tsv") else _tables(file)


def _json(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a list, which may be the field `data` of an object."""
    try:
        held = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON: {error}.\n  Write the file again.") from None
    held = held.get("data") if isinstance(held, dict) else held
    if not (isinstance(held, list) and all(isinstance(each, dict) for each in held)):
        raise DataError(
            f"{file} holds no list of objects.\n"
            '  Write a list of examples, or one as the field "data" of an object.'
        )
    yield from held


def _separated(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a CSV file, or of a TSV file, which has no quotes."""
    form: type[csv.Dialect] = csv.excel if file.suffix == ".csv" else _Tabs
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            for number, row in enumerate(csv.DictReader(stream, dialect=form, strict=True), 1):
                if None in row or None in row.values():
                    raise DataError(
                        f"{file}:{number}: a row has another number of columns than the first "
                        "line.\n  Repair it."
                    )
                yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}.\n  Write the file again.") from None


def opened(file: Path) -> io.BufferedReader:
    """Returns the stream of the bytes of a file, which may be compressed."""
    return io.BufferedReader(Gunzipped(file), 1 << 20) if file.suffix == ".gz" else file.open("rb")


def json_lines(
    file: Path, form: str = "one object with the fields of an example"
) -> Iterator[dict[str, Any] | None]:
    """Yields the object of each line, and None for an empty line. `form` is for messages."""
    with opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                yield None
                continue
            try:
                example = json.loads(line)
            # ValueError is also raised for bytes that are not UTF-8, RecursionError for `[[[[...`.
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{file}:{number}: not JSON: {error}.\n"
                    f"  A .jsonl file holds one JSON object a line; repair or remove this one."
                ) from None
            if not isinstance(example, dict):
                raise DataError(
                    f"{file}:{number}: expected a JSON object, found {type(example).__name__}.\n"
                    f"  Write each line as {form}."
                )
            yield example


def _tables(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet file, or of an Arrow stream as `datasets` writes it."""
    require("pyarrow", "parquet", f"{file.name}")
    import pyarrow
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        else:
            with pyarrow.memory_map(str(file)) as mapped:
                for batch in pyarrow.ipc.open_stream(mapped):
                    yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {error}.\n  Write the file again.") from None
