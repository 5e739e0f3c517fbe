"""Asynchronous, sharded array storage through Orbax; arrays are read back onto any sharding.

Only this file imports Orbax, and it uses only the handler that writes and reads arrays in an
existing directory. `saving.py` decides when a checkpoint is complete and handles failed saves:
Orbax's own checkpointers leave the other processes waiting for minutes when one of them fails.
"""

import asyncio
import dataclasses
import json
import logging
import math
import pathlib
import sys
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.checkpoint.checksums import walk
from shardlib.checkpoint.errors import DamageError
from shardlib.checkpoint.tree import Leaf, is_key, sharding_of

T = TypeVar("T")

# Bytes that one process reads at a time: at least READ_BYTES, and 1/READ_PART of the bytes that it
# holds of a large state. Orbax's default of 96 GB doubles host memory; this bound keeps a restore
# near the size of the state.
READ_BYTES = 16_000_000
READ_PART = 64
# Stored chunks are at most this large: a reader of a small shard reads whole chunks.
CHUNK_BYTES = 32 * 2**20
# Replicas share the writing of an array only above this size per slice. Below it, slicing on the
# device (one program compiled per shape) costs more than it saves.
REPLICA_SLICE_BYTES = 64 * 2**20
_CLOSED = "Event loop is closed"


class Future(Protocol):
    """A write in progress."""

    def result(self, timeout: float | None = None) -> object: ...


class ArrayWriter:
    """Writes arrays in the background, one set at a time; every process participates."""

    def __init__(self) -> None:
        _quiet_orbax()
        self._handler = _state_handler(READ_BYTES)

    def start(self, directory: pathlib.Path, arrays: Mapping[str, Leaf]) -> Sequence[Future]:
        """Starts writing `arrays` into `directory`, which exists.

        Returns once the arrays are copied to the host: they may then be donated or deleted.

        Returns:
            The futures to wait for; `result()` raises the error of a failed write.
        """
        stored = unflatten_dict(
            {path: _to_stored(array) for path, array in arrays.items()}, sep="/"
        )
        chunked = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
        item = ocp.args.PyTreeSave(stored, save_args=jax.tree.map(lambda _: chunked, stored))
        return _complete(self._handler.async_save(epath.Path(directory), args=item)) or []

    def finish(self, directory: pathlib.Path) -> None:
        """Merges the files of all processes into one store; only the first process calls it."""
        self._handler.finalize(epath.Path(directory))

    def close(self) -> None:
        """Stops the background threads."""
        self._handler.close()


def own_files(directory: pathlib.Path) -> list[str]:
    """Returns the relative paths of the files below `directory` that only this process writes."""
    own = f"ocdbt.process_{jax.process_index()}"
    return [f"{own}/{name}" for name in walk(directory / own)] if (directory / own).is_dir() else []


def read(directory: pathlib.Path, targets: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Returns arrays of the checkpoint `directory` by path, bit for bit.

    Args:
        directory: A complete checkpoint with leaves of the paths, shapes and dtypes of `targets`;
            it may have others.
        targets: A `jax.ShapeDtypeStruct` or an array by path. A target with a sharding gives a
            `jax.Array` with that sharding, one without gives a numpy array on the host, and a
            Python number gives a number. PRNG keys always become `jax.Array`.

    Raises:
        DamageError: If the shape of a stored array differs from its target.
    """
    _quiet_orbax()
    stored = {path: _StoredTarget.of_leaf(target) for path, target in targets.items()}
    present = {path: target for path, target in stored.items() if math.prod(target.shape)}
    # Orbax does not store arrays without elements; there is nothing to read for them.
    arrays: dict[str, Leaf] = {
        path: np.zeros(t.shape, t.dtype) for path, t in stored.items() if path not in present
    }
    if present:
        location = epath.Path(directory) / "state"
        handler = _state_handler(_read_bytes(directory, present))
        restore_args = {path: target.restore_args() for path, target in present.items()}
        item = {path: jax.ShapeDtypeStruct(t.shape, t.dtype) for path, t in present.items()}
        restored = handler.restore(
            location,
            args=ocp.args.PyTreeRestore(
                item=unflatten_dict(item, sep="/"),
                restore_args=unflatten_dict(restore_args, sep="/"),
                partial_restore=True,
            ),
        )
        handler.close()
        arrays |= flatten_dict(restored, sep="/")
    return {path: _from_stored(arrays[path], target) for path, target in targets.items()}


def _complete(coroutine: Coroutine[object, None, T]) -> T:
    """Runs a coroutine to completion, even if an event loop is running, as in a notebook."""

    def run() -> T:
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(coroutine)
        finally:
            loop.close()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@dataclasses.dataclass(frozen=True)
class _StoredTarget:
    """The shape, dtype and sharding that one leaf is read with; PRNG keys are read as integers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None

    @staticmethod
    def of_leaf(leaf: Leaf) -> "_StoredTarget":
        sharding = sharding_of(leaf)
        if is_key(leaf):
            sharding = _key_data_sharding(sharding, leaf.ndim)
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        return _StoredTarget(tuple(array.shape), np.dtype(array.dtype), sharding)

    def restore_args(self) -> ocp.RestoreArgs:
        if self.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=self.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=self.sharding, global_shape=self.shape, dtype=self.dtype, strict=True
        )

    def shard_shape(self) -> tuple[int, ...]:
        return self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)

    def local_bytes(self) -> int:
        devices = 1 if self.sharding is None else len(self.sharding.addressable_devices)
        return devices * math.prod(self.shard_shape()) * self.dtype.itemsize


def _state_handler(read_bytes: int) -> ocp.PyTreeCheckpointHandler:
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=REPLICA_SLICE_BYTES
    )
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # zstd halves the speed and saves only about 15% of the bytes.
        restore_concurrent_gb=read_bytes / 1e9,  # type: ignore[arg-type]
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler()), (jax.Array, arrays)
        ),
    )


def stored_structs(targets: Mapping[str, Leaf]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the stored structs of the leaves with elements and a sharding, by path."""
    stored = {path: _StoredTarget.of_leaf(target) for path, target in targets.items()}
    return {
        path: jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)
        for path, target in stored.items()
        if math.prod(target.shape) and target.sharding is not None
    }


def chunk_shapes(
    directory: pathlib.Path, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Returns the chunk shapes of arrays in the checkpoint `directory`, by path.

    This reads the index of all arrays, which has its own checksums. Shapes are as in the manifest;
    PRNG keys have the shape of the integers behind them.

    Raises:
        DamageError: If an array is stored with another shape. This check runs before any memory
            is allocated for the array.
        Exception: Of various types, if the index is damaged.
    """
    store = ts.KvStore.open(_store(directory)).result()
    store.list().result()
    reads = {path: store.read(f"{_name(path)}/.zarray") for path in shapes}
    chunks = {}
    for path, shape in shapes.items():
        stored = json.loads(reads[path].result().value)
        chunk = tuple(stored["chunks"])
        is_inside = all(1 <= size <= dim for size, dim in zip(chunk, shape, strict=False))
        if tuple(stored["shape"]) != shape or len(chunk) != len(shape) or not is_inside:
            raise DamageError(
                f"{path} is stored with shape {stored['shape']} in chunks of {list(chunk)}, "
                f"but was saved with shape {list(shape)}"
            )
        chunks[path] = chunk
    return chunks


def read_whole(directory: pathlib.Path, path: str) -> np.ndarray:
    """Reads one array of the checkpoint `directory` to the host, as stored, without a device.

    PRNG keys are returned as the integers behind them.

    Raises:
        Exception: Of various types, if the array is damaged.
    """
    kvstore = {**_store(directory), "path": f"{_name(path)}/"}
    return ts.open({"driver": "zarr", "kvstore": kvstore}, open=True).result().read().result()


def _store(directory: pathlib.Path) -> dict[str, object]:
    """Returns the TensorStore spec of the store that Orbax wrote."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory / 'state'}/"}}


def _name(path: str) -> str:
    return path.replace("/", ".")


def _read_bytes(directory: pathlib.Path, targets: Mapping[str, _StoredTarget]) -> int:
    """Returns the bytes that may be in flight: the bound, or the size of the largest single read.

    Orbax rejects a read larger than the bound instead of running it alone. A read covers whole
    chunks, and an unaligned shard touches one more chunk in each dim.
    """
    chunks = chunk_shapes(directory, {path: target.shape for path, target in targets.items()})
    largest = 0
    for path, target in targets.items():
        footprint = target.dtype.itemsize
        for dim, shard, step in zip(target.shape, target.shard_shape(), chunks[path], strict=True):
            footprint *= step * min(-(-dim // step), (shard - 1) // step + 2)
        largest = max(largest, footprint)
    held = sum(target.local_bytes() for target in targets.values())
    return max(read_bound(held), largest + 1)


def read_bound(held_bytes: int) -> int:
    """Returns the bound on bytes in flight of a process whose devices will hold `held_bytes`.

    A single larger read raises it.
    """
    return max(READ_BYTES, held_bytes // READ_PART)


def _to_stored(leaf: Leaf) -> jax.Array | np.ndarray:
    """Returns the value that Orbax writes for a leaf: a global `jax.Array` or a numpy copy."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        # A scalar made by `jnp.int32(3)` lives on this process only. The first process writes
        # numpy arrays.
        local = jax.process_count() > 1 and leaf.is_fully_addressable
        return np.asarray(leaf) if local else leaf
    return np.array(leaf)  # A copy: the caller may change its array during the save.


def _from_stored(array: Leaf, target: Leaf) -> Leaf:
    """Returns the stored value as a leaf of the type of `target`."""
    sharding = sharding_of(target)
    if is_key(target):
        keys = jax.random.wrap_key_data(array, impl=_key_impl(target))
        return keys if sharding is None else jax.device_put(keys, sharding)
    if sharding is not None:
        if isinstance(array, jax.Array):
            return array
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    if isinstance(target, bool | int | float | complex) and not isinstance(target, np.generic):
        return array.item()
    return array[()] if isinstance(target, np.generic) else array


def _key_data_sharding(sharding: Sharding | None, ndim: int) -> Sharding | None:
    """Returns the sharding of the integers behind keys, with one more, replicated dim."""
    if sharding is None or not isinstance(sharding, NamedSharding):
        return sharding
    spec = tuple(sharding.spec) + (None,) * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _key_impl(target: Leaf) -> object:
    """Returns the PRNG implementation of keys, which may be abstract."""
    impls: list[object] = []
    keys = jax.ShapeDtypeStruct(target.shape, target.dtype)
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), keys)
    return impls[0]


def _quiet_orbax() -> None:
    """Silences the log of Orbax, and the late errors of a failed save.

    Orbax closes its event loop at the first failed write. Each write still in progress then finds
    the loop closed, in a thread that cannot raise to anyone, and fails in a task that nobody
    awaits. `ArrayWriter` has reported the first error by then.
    """
    logging.getLogger("absl").addFilter(_is_foreign)
    logging.getLogger("asyncio").addFilter(_is_awaited)
    former = sys.unraisablehook
    if hasattr(former, "drops_late_writes"):
        return

    def hook(late: "sys.UnraisableHookArgs", /) -> None:
        # Python names the object of errors that it cannot raise itself.
        is_late = isinstance(late.exc_value, RuntimeError) and str(late.exc_value) == _CLOSED
        if not is_late or late.object is not None:
            former(late)

    hook.drops_late_writes = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook


def _is_foreign(record: logging.LogRecord) -> bool:
    """Whether a record is not from Orbax, which logs through absl.

    It logs routine events at `WARNING`, and thread failures at `ERROR` with a page of traceback
    each; the futures of `ArrayWriter.start` raise these failures anyway.
    """
    return "orbax" not in pathlib.PurePath(record.pathname).parts


def _is_awaited(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is not about an Orbax write that nobody awaits."""
    text = record.getMessage()
    return "never retrieved" not in text or "orbax" not in text
