"""Folders of safetensors files: mapped for reading, streamed for writing.

A file holds the length of its header (8 bytes, little endian), the header (JSON: dtype, shape and
offsets of each tensor), and the bytes of the tensors. The header comes from strangers, so nothing
in it is trusted before it is checked.

Source: the format's description, https://github.com/huggingface/safetensors.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from shardlib.errors import CheckpointError, ModelError, did_you_mean
from shardlib.hf.tensor_table import Index, TensorTable

SINGLE = "model.safetensors"
DIFFUSERS = "diffusion_pytorch_model.safetensors"
"""The name of the file in folders of the library diffusers."""
MAX_FILE_BYTES = 5 * 10**9
"""Size of a file at most, unless one tensor is larger: the hub's own unit."""

_MAX_HEADER_BYTES = 100_000_000
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """The place of one tensor."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


Reader = Callable[[Path], tuple[dict[str, Entry], mmap.mmap]]


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of a folder by name, mapped into memory and read only."""

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Collection[str]] | None = None,
        read: Reader | None = None,
    ):
        """Reads and checks the headers of all files of a folder.

        Args:
            folder: The folder.
            files: Its files as of `files_of`; None for its safetensors files.
            read: Reads the header of one file of another format.

        Raises:
            CheckpointError: If the folder has no safetensors files, a file of its index is missing,
                lacks tensors that the index has there, or headers are malformed. The message lists
                all faults.
        """
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._maps: dict[str, mmap.mmap] = {}
        faults = []
        held = safetensors_of(folder) if files is None else files
        for file, names in held.items():
            try:
                entries, self._maps[file] = (read or _open)(folder / file)
            except (OSError, ValueError) as error:
                faults.append(f"{file}: {error}")
                continue
            faults += [
                f"{name}: in {file} and in {self.entries[name].file}."
                for name in entries.keys() & self.entries.keys()
            ]
            faults += [
                f"{name}: not in {file}, which the index names."
                for name in names
                if name not in entries
            ]
            self.entries |= entries
        if faults:
            raise CheckpointError(
                f"{folder} cannot be read:\n  " + "\n  ".join(faults) + "\n  Download it again."
            )

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self.entries[name]
        count = math.prod(entry.shape)
        flat = np.frombuffer(self._maps[entry.file], entry.dtype, count, entry.start)
        return flat.reshape(entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def shard(
        self, layout: TensorTable, path: str, index: Index, names: Mapping[str, str]
    ) -> np.ndarray:
        """Returns a shard of our parameter of a path, copied.

        Args:
            layout: The table of the tensors.
            path: The path of the parameter.
            index: The slice of each of its dims.
            names: The name here of each tensor of the table.
        """
        return layout.read(path, index, lambda name: self[names[name]])

    def drop(self, name: str) -> None:
        """Lets go of the pages of a tensor, which are read again at its next use."""
        entry = self.entries[name]
        start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
        length = entry.start + entry.num_bytes - start
        if hasattr(mmap, "MADV_DONTNEED") and length:
            self._maps[entry.file].madvise(mmap.MADV_DONTNEED, start, length)


def index_of(single: str) -> str:
    """Returns the name of the index that lists the files, for the name of a single one."""
    return f"{single}.index.json"


def safetensors_of(folder: Path) -> dict[str, list[str]]:
    """Returns what `files_of` does for safetensors files of transformers or diffusers."""
    others = (DIFFUSERS, index_of(DIFFUSERS))
    single = DIFFUSERS if any((folder / name).exists() for name in others) else SINGLE
    return files_of(folder, index_of(single), single)


def files_of(folder: Path, index: str, single: str) -> dict[str, list[str]]:
    """Returns the names of the files that hold the tensors of a folder, and the tensors in each.

    Without an index the lists are empty.

    Args:
        folder: The folder.
        index: The name of the file that lists several files.
        single: The name of the file if there is one alone.

    Raises:
        CheckpointError: If no file is there, or the index is malformed or names absent files.
    """
    if not (folder / index).exists():
        if (folder / single).exists():
            return {single: []}
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        held = f"; {', '.join(pickles[:3])} may hold code of strangers" if pickles else ""
        raise CheckpointError(
            f"{folder} has neither {single} nor {index}{held}.\n"
            "  Convert it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other)"
            f"{', or allow .bin files' if pickles else ''}."
        )
    try:
        where = json.loads((folder / index).read_text())["weight_map"]
        files = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / index} is malformed: {error!r}.\n  Download it again."
        ) from None
    # A name with a directory could lead out of the folder.
    foreign = [file for file in files if not isinstance(file, str) or Path(file).name != file]
    absent = [file for file in files if file not in foreign and not (folder / file).is_file()]
    if foreign or absent:
        wrong = [f"{file!r} is outside of the folder" for file in foreign]
        wrong += [f"{file} is missing" for file in absent]
        raise CheckpointError(
            f"{folder / index} names files that cannot be read: {', '.join(wrong)}.\n"
            "  Download them into the folder."
        )
    return {file: [name for name, held in where.items() if held == file] for file in files}


def _open(path: Path) -> tuple[dict[str, Entry], mmap.mmap]:
    """Returns the entries and the map of one file; raises `ValueError` for a malformed header."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}; it is cut off.")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the header cannot be read: {error}.") from None
        if not isinstance(header, dict):
            raise ValueError("the header is not a JSON object.")
        header.pop("__metadata__", None)
        entries = {
            name: _entry(path.name, name, field, 8 + length) for name, field in header.items()
        }
        end = 8 + length
        for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.num_bytes)):
            if entry.start != end:
                raise ValueError("tensors overlap or leave gaps; the header is wrong.")
            end += entry.num_bytes
        if end != size:
            raise ValueError(f"tensors of {end} bytes in a file of {size}; it is cut off.")
        return entries, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):  # Parsers differ in which of them counts.
        raise ValueError("a name occurs twice")
    return fields


def _entry(file: str, name: str, field: Any, base: int) -> Entry:
    try:
        dtype, shape, (start, end) = field["dtype"], field["shape"], field["data_offsets"]
        numbers = [*shape, start, end]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name} has no dtype, shape and offsets.") from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name} has shape {shape} and offsets {start} to {end}.")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{name} is of dtype {dtype!r}.{did_you_mean(str(dtype), _DTYPES)}")
    entry = Entry(file, np.dtype(_DTYPES[dtype]), tuple(shape), base + start)
    if entry.num_bytes != end - start:
        raise ValueError(f"{name} has {end - start} bytes, but its shape needs {entry.num_bytes}.")
    return entry


def check_dtypes(dtypes: Iterable[np.dtype]) -> None:
    """Raises `ModelError` for dtypes whose numbers no file holds."""
    unknown = sorted({str(dtype) for dtype in dtypes if dtype not in _NAMES})
    if unknown:
        raise ModelError(
            f"safetensors files hold no numbers of dtype {', '.join(unknown)}.\n"
            f"  Choose one of: {', '.join(map(str, _NAMES))}."
        )


def write(
    folder: Path,
    specs: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    tensors: Iterable[tuple[str, np.ndarray]],
    max_file_bytes: int = MAX_FILE_BYTES,
    single: str = SINGLE,
) -> None:
    """Writes tensors as a stream: one is in memory at a time.

    Args:
        folder: An existing folder.
        specs: The shape and the dtype of each tensor by name.
        tensors: Their values, in the order of `specs`.
        max_file_bytes: Size of the tensors of one file at most, unless one is larger.
        single: The name of the file where one file holds all tensors; names of several begin alike.
    """
    files = _split(specs, max_file_bytes)
    start, end = Path(single).stem, Path(single).suffix
    names = [
        single if len(files) == 1 else f"{start}-{number:05}-of-{len(files):05}{end}"
        for number in range(1, len(files) + 1)
    ]
    values = iter(tensors)
    for name, held in zip(names, files, strict=True):
        with (folder / name).open("xb") as file:
            file.write(_header({tensor: specs[tensor] for tensor in held}))
            for tensor in held:
                given, array = next(values)
                shape, dtype = specs[tensor]
                assert (given, array.shape, array.dtype) == (tensor, shape, dtype)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        total = sum(_num_bytes(spec) for spec in specs.values())
        where = {tensor: name for name, held in zip(names, files, strict=True) for tensor in held}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / index_of(single)).write_text(json.dumps(index, indent=2) + "\n")


def _num_bytes(spec: tuple[Sequence[int], np.dtype]) -> int:
    return math.prod(spec[0]) * spec[1].itemsize


def _split(specs: Mapping[str, Any], max_file_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if files[-1] and size + _num_bytes(spec) > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += _num_bytes(spec)
    return files


def _header(specs: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in specs.items():
        start, end = end, end + _num_bytes((shape, dtype))
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
