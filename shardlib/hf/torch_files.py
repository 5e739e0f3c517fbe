"""Folders of torch's `.bin` files, read without torch and without running what they hold.

A file is a zip archive of stored entries: `data.pkl`, a pickle that describes the tensors, and one
entry of bytes for each storage. A pickle names functions to call. Here each name stands for a
function of this file, and any other name is refused.

Source: `torch.save` in torch/serialization.py, format of version 1.6 and later.
"""

import collections
import math
import mmap
import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from shardlib.errors import CheckpointError
from shardlib.hf.safetensors import Entry, Tensors, files_of

INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"

_MAX_PICKLE_BYTES = 100_000_000
_LOCAL_HEADER_BYTES = 30
_STORAGES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class TorchTensors(Tensors):
    """The tensors of a folder of `.bin` files by name, mapped into memory and read only."""

    def __init__(self, folder: Path):
        """Reads the descriptions in all files of a folder.

        Raises:
            CheckpointError: If the folder has no `.bin` files, a file of its index is missing, or
                files are malformed or name other functions. The message lists all faults.
        """
        super().__init__(folder, files_of(folder, INDEX, SINGLE), _open)


class _Storage(NamedTuple):
    """A storage of a pickle: the dtype of its numbers, its entry, and how many it holds."""

    dtype: np.dtype
    key: str
    count: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Named:
    """A stand-in of a name. It has no attributes that a pickle could set."""

    __slots__ = ()


class _RebuildTensor(_Named):
    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> _Tensor:
        numbers = [offset, *shape, *strides]
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise ValueError("a tensor without a storage, or with other dims than strides.")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"a tensor of offset, shape and strides {numbers}.")
        return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _RebuildParameter(_Named):
    __slots__ = ()

    def __call__(self, tensor: Any, *rest: Any) -> Any:
        return tensor


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns what a name stands for; refuses names that no state of weights needs."""
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _RebuildTensor()
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _RebuildParameter()
        if module == "torch" and name in _STORAGES:
            return name
        raise ValueError(f"it names {module}.{name}, which weights do not need.")

    def persistent_load(self, pid: Any) -> _Storage:
        """Returns a storage by its description."""
        kind, name, key, _, count = pid
        if kind != "storage" or name not in _STORAGES or not isinstance(key, str):
            raise ValueError(f"it describes no storage: {pid!r}.")
        if type(count) is not int or count < 0:
            raise ValueError(f"storage {key} of {count!r} numbers.")
        return _Storage(np.dtype(_STORAGES[name]), key, count)


def _open(path: Path) -> tuple[dict[str, Entry], mmap.mmap]:
    """Returns the entries and the map of one file; raises `ValueError` for a malformed file."""
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            held = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            described = held["data.pkl"]
            if described.file_size > _MAX_PICKLE_BYTES:
                raise ValueError(f"a description of {described.file_size} bytes.")
            if "byteorder" in held and archive.read(held["byteorder"]) != b"little":
                raise ValueError("its bytes are not in little-endian order.")
            with archive.open(described) as stream:
                tensors = _Unpickler(stream).load()
        except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"it is not an archive of torch 1.6 or later ({error}).") from None
        # A malformed pickle raises whatever its first wrong instruction does.
        except Exception as error:
            raise ValueError(f"its description cannot be read: {error}") from None
        if not isinstance(tensors, dict):
            raise ValueError("it does not hold tensors by name.")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    entries = {}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, _Tensor):
            raise ValueError(f"{name!r} is not a tensor.")
        start = _start(mapped, held.get(f"data/{tensor.storage.key}"), tensor.storage, name)
        _check(name, tensor)
        offset = start + tensor.offset * tensor.storage.dtype.itemsize
        entries[name] = Entry(path.name, tensor.storage.dtype, tensor.shape, offset)
    return entries, mapped


def _start(mapped: mmap.mmap, info: zipfile.ZipInfo | None, storage: _Storage, name: str) -> int:
    """Returns the offset of a storage in its file."""
    size = storage.count * storage.dtype.itemsize
    if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != size:
        raise ValueError(f"{name}: storage {storage.key} of {size} bytes is not in the file.")
    header = mapped[info.header_offset : info.header_offset + _LOCAL_HEADER_BYTES]
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = info.header_offset + _LOCAL_HEADER_BYTES + lengths
    if not header.startswith(b"PK\3\4") or start + size > len(mapped):
        raise ValueError(f"{name}: storage {storage.key} lies outside of the file.")
    return start


def _check(name: str, tensor: _Tensor) -> None:
    """Refuses a tensor that leaves its storage, or whose numbers do not follow each other."""
    if tensor.offset + math.prod(tensor.shape) > tensor.storage.count:
        raise ValueError(f"{name} of shape {tensor.shape} is larger than its storage.")
    dense = 1
    for size, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if size > 1 and stride != dense:
            raise ValueError(f"{name} is a view with strides {tensor.strides}, not contiguous.")
        dense *= size


def open_tensors(folder: Path, *, allow_bin: bool) -> Tensors:
    """Returns the tensors of a folder: safetensors, or `.bin` files if these alone are there.

    Raises:
        CheckpointError: If the folder has no files that are allowed, or they are malformed.
    """
    try:
        return Tensors(folder)
    except CheckpointError:
        has_bin = (folder / INDEX).exists() or (folder / SINGLE).exists()
        has_safe = any(folder.glob("*.safetensors*"))
        if not allow_bin or not has_bin or has_safe:
            raise
        return TorchTensors(folder)
