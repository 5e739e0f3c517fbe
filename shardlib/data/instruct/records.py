"""Examples from files: JSONL, Parquet and Arrow."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlib.data.hashing import digest
from shardlib.data.instruct.builtin import builtin_examples
from shardlib.data.safe_gzip import Gunzipped
from shardlib.data.text.corpus import BUILTIN, builtin_files
from shardlib.data.text.sources import missing
from shardlib.errors import DataError, require

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def examples(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
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
        rows = _jsonl(file) if ".jsonl" in file.suffixes else _tables(file)
        for number, example in enumerate(rows, 1):
            if example is not None:
                yield f"{file}:{number}", example


def key(path: str) -> str:
    """Returns a digest of the files of a path (name, size, modification time), unread."""
    files = builtin_files("builtin:python") if path.startswith(BUILTIN) else _files(path)
    stats = [(os.path.abspath(file), file.stat()) for file in files]
    return digest((path, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)))


def _files(path: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_file() and place.name.endswith(_SUFFIXES):
        return [place]
    if (place / "state.json").is_file():
        state = json.loads((place / "state.json").read_text())
        return [place / entry["filename"] for entry in state["_data_files"]]
    if not place.exists():
        raise missing(path)
    action = f"Give a {', '.join(_SUFFIXES)} file, or a folder that save_to_disk wrote."
    if (place / "dataset_dict.json").is_file():
        splits = json.loads((place / "dataset_dict.json").read_text())["splits"]
        action = f"Give the folder of one split: {', '.join(str(place / name) for name in splits)}."
    raise DataError(f"{path!r} is not a set of examples.\n  {action}")


def _jsonl(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the object of each line, and None for an empty line."""
    with Gunzipped(file) if file.suffix == ".gz" else file.open("rb") as stream:
        lines = io.BufferedReader(stream) if file.suffix == ".gz" else stream
        for number, line in enumerate(lines, 1):
            try:
                example = json.loads(line) if line.strip() else None
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{file}:{number}: not JSON: {error}.\n"
                    f"  A .jsonl file holds one JSON object a line; repair or remove this one."
                ) from None
            if example is not None and not isinstance(example, dict):
                raise DataError(
                    f"{file}:{number}: expected a JSON object, found {type(example).__name__}.\n"
                    "  Write each line as one object with the fields of an example."
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
