"""Batches formed on the devices ahead of the step that uses them."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardlib.data.loader import Source

_ERROR, _BATCH, _END = "error", "batch", "end"
_LOG = logging.getLogger(__name__)

MOST_CLOSE_SECONDS = 5.0
"""How long closing waits for a read that is under way: less than any grace period of a cluster."""


class Prefetcher:
    """Iterates over the batches of a source as global arrays, read ahead in a thread.

    Each process reads only the rows that its own devices hold, once each. An error in the thread is
    raised by the `__next__` that would have given the batch, and by each one after it. A read that
    never ends keeps `__next__` waiting: whoever drives the loop must say how long is too long.

    Close it when done, or use it as a context manager; it also ends when it is collected or the
    interpreter exits. A read that is under way is given `MOST_CLOSE_SECONDS` to end; then its
    thread is left behind, with a warning, and cannot keep the process.

    Args:
        source: Where batches come from.
        shardings: The sharding of each array of a batch, by name. Dims after the first may be
            sharded too.
        start_step: The first step to read.
        depth: Batches held ready. One more may be in the making.

    Raises:
        ValueError: If the shardings are not those of the batch, or do not divide it.
    """

    wait_seconds: float
    """How long the last `__next__` waited for its batch."""

    def __init__(
        self,
        source: Source,
        shardings: Mapping[str, NamedSharding],
        start_step: int = 0,
        depth: int = 2,
    ):
        spec = source.element_spec()
        if set(spec) != set(shardings):
            raise ValueError(
                f"shardings are for {sorted(shardings)} but a batch holds {sorted(spec)}"
            )
        if depth < 1:
            raise ValueError(f"depth must be at least 1, not {depth}")
        reader = _Reader(source, spec, shardings, start_step)
        self.wait_seconds = 0.0
        self._queue: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._last: tuple[str, Any] | None = None
        # The thread holds no reference to this object, so that it can be collected.
        self._thread = threading.Thread(
            target=_fill,
            args=(reader, source.num_steps, self._queue, self._stopped),
            name="shardlib-prefetch",
            daemon=True,
        )
        self._thread.start()
        self._close = weakref.finalize(
            self, _stop, reader, self._stopped, self._queue, self._thread
        )

    def __iter__(self) -> "Prefetcher":
        return self

    @property
    def is_ready(self) -> bool:
        """Whether `__next__` will not wait."""
        return self._last is not None or not self._queue.empty()

    def __next__(self) -> dict[str, jax.Array]:
        if not self._close.alive:
            raise ValueError("this Prefetcher is closed")
        started = time.perf_counter()
        kind, value = self._last or self._queue.get()
        self.wait_seconds = time.perf_counter() - started
        if kind == _BATCH:
            return value
        self._last = kind, value
        if kind == _ERROR:
            raise value
        raise StopIteration

    def close(self) -> None:
        """Ends the thread and lets go of the batches held ready. May be called again."""
        self._close()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Reader:
    """Forms the global arrays of one step after another."""

    def __init__(
        self,
        source: Source,
        spec: Mapping[str, jax.ShapeDtypeStruct],
        shardings: Mapping[str, NamedSharding],
        step: int,
    ):
        self.step = step
        """The step that is read next."""
        self._source = source
        self._spec = spec
        self._shardings = shardings
        needed = set()
        for name, array in spec.items():
            indices = shardings[name].addressable_devices_indices_map(array.shape)
            # Uneven shards would need a padded batch: refused here and not in the thread.
            shardings[name].shard_shape(array.shape)
            rows = [index[0].indices(array.shape[0])[:2] for index in indices.values() if index]
            needed.update(rows)
        self._ranges = merged(sorted(needed))

    def __call__(self) -> dict[str, jax.Array]:
        chunks = [
            (start, self._source.read(self.step, start, stop)) for start, stop in self._ranges
        ]
        batch = {name: self._array(name, chunks) for name in self._spec}
        self.step += 1
        return batch

    def _array(self, name: str, chunks: Sequence[tuple[int, dict[str, np.ndarray]]]) -> jax.Array:
        spec = self._spec[name]

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "only addressable devices are asked for"
            start, stop, _ = index[0].indices(spec.shape[0])
            first, chunk = next(
                pair for pair in reversed(chunks) if pair[0] <= start
            )  # Ranges do not overlap, so the last one that starts early enough holds the rows.
            return chunk[name][(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback(
            spec.shape, self._shardings[name], shard, dtype=spec.dtype
        )


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns sorted ranges [start, stop) with those that touch or overlap made one."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result


def _fill(
    reader: _Reader,
    num_steps: int | None,
    batches: queue.Queue[tuple[str, Any]],
    stopped: threading.Event,
) -> None:
    try:
        while not stopped.is_set():
            if num_steps is not None and reader.step >= num_steps:
                batches.put((_END, None))
                return
            batches.put((_BATCH, reader()))
    except BaseException as error:  # Whatever it is, the training loop must hear of it.
        batches.put((_ERROR, error))


def _stop(
    reader: _Reader,
    stopped: threading.Event,
    batches: queue.Queue[tuple[str, Any]],
    thread: threading.Thread,
) -> None:
    stopped.set()
    _drain(batches)
    if thread is threading.current_thread():  # The garbage collector may run anywhere.
        return
    deadline = time.monotonic() + MOST_CLOSE_SECONDS
    while thread.is_alive():  # It may wait for room in the queue.
        _drain(batches)
        thread.join(0.01)
        if time.monotonic() > deadline:
            _LOG.warning(
                "the thread that reads the batch of step %d has not ended within %g s and is left "
                "behind; it still holds what it has open",
                reader.step,
                MOST_CLOSE_SECONDS,
            )
            return
    _drain(batches)


def _drain(batches: queue.Queue[tuple[str, Any]]) -> None:
    while True:
        try:
            batches.get_nowait()
        except queue.Empty:
            return
