"""Arrays on disk, by Orbax: asynchronous, sharded, each checkpoint committed by one rename.

This is the one file that knows Orbax. It writes named arrays and one JSON document into a
directory that appears when it is complete, and reads the arrays back onto any sharding. Which
directories there are, and what may be deleted, is decided elsewhere (`store.py`).
"""

import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.checkpoint.manifest import FILE_NAME
from shardlib.checkpoint.tree import is_key, nest, unnest

# Orbax writes `name` + this, and renames it to `name` when it is complete.
TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
# Read in flight at a time by one process. Orbax's default of 96 GB doubles host memory; this
# keeps a restore near the size of the state.
READ_BYTES = 100_000_000
# Stored chunks are at most this large: a reader of a small shard reads whole chunks.
CHUNK_BYTES = 32 * 2**20
# Replicas share the writing of an array only above this size per slice. Below it, slicing on the
# device (a program to compile for each shape) costs more than it saves.
REPLICA_SLICE_BYTES = 64 * 2**20


class ArrayWriter:
    """Writes checkpoints in the background, one at a time.

    `save` returns when the arrays are copied to the host: they may then be donated or deleted.
    Every process calls every method, in the same order.
    """

    def __init__(self) -> None:
        _quiet_orbax()
        self._handler = _Handler(state=_state_handler(READ_BYTES))  # type: ignore[arg-type]
        # Directories are made before `save` returns: a failure there is raised at once, where
        # Orbax's other way leaves threads that wait for a signal that never comes.
        options = ocp.AsyncOptions(create_directories_asynchronously=False)
        self._checkpointer = ocp.AsyncCheckpointer(self._handler, async_options=options)

    def save(self, directory: pathlib.Path, arrays: Mapping[str, Any], document: str) -> None:
        """Starts writing `arrays` and the text `document` as the checkpoint `directory`."""
        self.wait()
        self._handler.document = document
        stored = nest({path: _to_stored(array) for path, array in arrays.items()})
        chunked = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
        item = ocp.args.PyTreeSave(stored, save_args=jax.tree.map(lambda _: chunked, stored))
        self._checkpointer.save(epath.Path(directory), args=_Arguments(state=item))

    def wait(self) -> None:
        """Blocks until the last save is committed; raises what went wrong in it, once."""
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the background threads."""
        self._checkpointer.close()


def read(directory: pathlib.Path, targets: Mapping[str, Any]) -> dict[str, Any]:
    """Reads arrays of the checkpoint `directory`, bit for bit.

    Args:
        directory: A complete checkpoint, whose leaves have the shapes and dtypes of `targets`.
        targets: By path, a `jax.ShapeDtypeStruct` or an array: one with a sharding gives a
            `jax.Array` of that sharding, one without gives a numpy array on the host, a Python
            number gives a number. PRNG keys always become `jax.Array`.

    Returns:
        The arrays by path.
    """
    _quiet_orbax()
    stored = {path: _StoredTarget(target) for path, target in targets.items()}
    present = {path: target for path, target in stored.items() if math.prod(target.shape)}
    # Orbax has no arrays without elements, and nothing needs to be read for them.
    arrays = {path: np.zeros(t.shape, t.dtype) for path, t in stored.items() if path not in present}
    if present:
        location = epath.Path(directory) / "state"
        handler = _state_handler(_read_bytes(location, present))
        restore_args = nest({path: target.restore_args() for path, target in present.items()})
        item = nest({path: target.struct() for path, target in present.items()})
        restored = handler.restore(
            location, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
        )
        handler.close()
        arrays |= unnest(restored)
    return {path: _from_stored(arrays[path], target) for path, target in targets.items()}


class _Handler(ocp.CompositeCheckpointHandler):
    """Adds the JSON document to the temporary directory just before it is renamed."""

    document: str = ""

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        (directory / FILE_NAME).write_text(self.document)


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)  # type: ignore[arg-type]
class _Arguments(ocp.args.Composite):
    """Orbax finds the arguments of a handler by class."""


class _StoredTarget:
    """How one leaf is to be read: keys as the integers that they are stored as."""

    def __init__(self, target: Any) -> None:
        self.sharding = _sharding_of(target)
        if is_key(target):
            data = jax.eval_shape(jax.random.key_data, _struct(target))
            self.shape, self.dtype = data.shape, data.dtype
            self.sharding = _key_data_sharding(self.sharding, target.ndim)
        else:
            array = target if hasattr(target, "dtype") else np.asarray(target)
            self.shape, self.dtype = tuple(array.shape), array.dtype

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def restore_args(self) -> ocp.RestoreArgs:
        if self.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=self.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=self.sharding, global_shape=self.shape, dtype=self.dtype, strict=True
        )

    def shard_shape(self) -> tuple[int, ...]:
        return self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)


def _state_handler(read_bytes: int) -> ocp.PyTreeCheckpointHandler:
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=REPLICA_SLICE_BYTES
    )
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # zstd halves the speed for some 15% fewer bytes
        restore_concurrent_gb=read_bytes / 1e9,  # type: ignore[arg-type]
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (np.ndarray, ocp.type_handlers.NumpyHandler()), (jax.Array, arrays)
        ),
    )


def _read_bytes(location: epath.Path, targets: Mapping[str, _StoredTarget]) -> int:
    """Returns the bytes that may be in flight: the bound, or what the largest single read needs.

    Orbax refuses a read larger than the bound instead of doing it alone. A read is of whole
    chunks, and a shard that is not aligned to them touches one more in each dim.
    """
    handler = _state_handler(READ_BYTES)
    stored = unnest(handler.metadata(location).tree)
    handler.close()
    largest = 0
    for path, target in targets.items():
        chunk = stored[path].storage.chunk_shape if stored[path].storage else target.shape
        footprint = np.dtype(target.dtype).itemsize
        for dim, shard, step in zip(target.shape, target.shard_shape(), chunk, strict=True):
            chunks = min(-(-dim // step), (shard - 1) // step + 2)
            footprint *= chunks * step
        largest = max(largest, footprint)
    return max(READ_BYTES, largest + 1)


def _to_stored(leaf: Any) -> Any:
    """Returns what Orbax writes for a leaf: a global `jax.Array`, or a numpy array of our own."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array):
        # A scalar made by `jnp.int32(3)` lives on this process alone; a numpy array is written
        # by the first process.
        local = jax.process_count() > 1 and leaf.is_fully_addressable
        return np.asarray(leaf) if local else leaf
    return np.array(leaf)  # a copy: the caller may change its array during the save


def _from_stored(array: Any, target: Any) -> Any:
    """Returns a leaf of the kind of `target` from what was stored for it."""
    if is_key(target):
        keys = jax.random.wrap_key_data(array, impl=_key_impl(target))
        sharding = _sharding_of(target)
        return keys if sharding is None else jax.device_put(keys, sharding)
    sharding = _sharding_of(target)
    if sharding is not None:
        if isinstance(array, jax.Array):
            return array
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    if isinstance(target, bool | int | float | complex) and not isinstance(target, np.generic):
        return array.item()
    return array[()] if isinstance(target, np.generic) else array


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _sharding_of(target: Any) -> Sharding | None:
    return getattr(target, "sharding", None)


def _key_data_sharding(sharding: Sharding | None, ndim: int) -> Sharding | None:
    """Returns the sharding of the integers behind keys: one replicated dim more."""
    if sharding is None or not isinstance(sharding, NamedSharding):
        return sharding
    spec = tuple(sharding.spec) + (None,) * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _key_impl(target: Any) -> Any:
    """Returns the generator of keys that may be abstract."""
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), _struct(target))
    return found[0]


class _OrbaxRecords(logging.Filter):
    """Keeps Orbax's log off the terminal, and nobody else's.

    Orbax logs through absl: at `WARNING` what is routine here, and at `ERROR` failures of its
    threads, with a page of traceback each, which `ArrayWriter.wait` then raises.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in pathlib.PurePath(record.pathname).parts


def _quiet_orbax() -> None:
    logger = logging.getLogger("absl")
    if not any(isinstance(present, _OrbaxRecords) for present in logger.filters):
        logger.addFilter(_OrbaxRecords())
