"""Prefetching of batches onto the devices."""

import contextlib
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
"""Seconds that `close` waits for a read in progress: less than any cluster's grace period."""


class Prefetcher:
    """Iterates over the batches of a source as global arrays, read ahead in a thread.

    Each process reads each row of its own devices once, and no other rows. An error in the thread
    is raised by the `__next__` of that batch and by all later calls. A read that never ends blocks
    `__next__`: the training loop must set a timeout.

    Close it when done, or use it as a context manager; it also stops at garbage collection or
    interpreter exit. A read in progress gets `MOST_CLOSE_SECONDS` to finish. After that its thread
    is abandoned with a warning; it cannot keep the process alive.

    Args:
        source: The source of the batches.
        shardings: The sharding of each array of a batch, by name. Dims after the first may be
            sharded too.
        start_step: The first step to read.
        depth: Number of batches held ready. One more may be in progress.

    Raises:
        ValueError: If the shardings have other names than the batch, or do not divide it.
    """

    wait_seconds: float
    """Seconds that the last `__next__` waited for its batch."""

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
        self.wait_seconds = 0.0
        self._last: tuple[str, Any] | None = None
        # The thread holds no reference to this object, so the object can be garbage-collected.
        reader = _Reader(source, spec, shardings, start_step, depth)
        self._queue = reader.batches
        reader.start()
        self._close = weakref.finalize(self, reader.stop)

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
        """Stops the thread and releases the batches held ready. May be called repeatedly."""
        self._close()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Reader(threading.Thread):
    """Creates the global arrays of successive steps, and puts them into a queue."""

    def __init__(
        self,
        source: Source,
        spec: Mapping[str, jax.ShapeDtypeStruct],
        shardings: Mapping[str, NamedSharding],
        step: int,
        depth: int,
    ):
        super().__init__(name="shardlib-prefetch", daemon=True)
        self.batches: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._step = step  # The next step to read.
        self._source, self._spec, self._shardings = source, spec, shardings
        self._stopped = threading.Event()
        needed = set()
        for name, array in spec.items():
            indices = shardings[name].addressable_devices_indices_map(array.shape)
            # Uneven shards would need a padded batch; this call rejects them outside of the thread.
            shardings[name].shard_shape(array.shape)
            rows = [index[0].indices(array.shape[0])[:2] for index in indices.values() if index]
            needed.update(rows)
        self._ranges = merged(sorted(needed))

    def run(self) -> None:
        num_steps = self._source.num_steps
        try:
            while not self._stopped.is_set():
                if num_steps is not None and self._step >= num_steps:
                    self.batches.put((_END, None))
                    return
                self.batches.put((_BATCH, self._read()))
        except BaseException as error:  # The training loop must see every error.
            self.batches.put((_ERROR, error))

    def stop(self) -> None:
        """Ends the thread, unless a read in progress takes too long, and drops all batches."""
        self._stopped.set()
        self._drain()
        if self is threading.current_thread():  # The garbage collector may run anywhere.
            return
        deadline = time.monotonic() + MOST_CLOSE_SECONDS
        while self.is_alive():  # The thread may be waiting for room in the queue.
            self._drain()
            self.join(0.01)
            if time.monotonic() > deadline:
                _LOG.warning(
                    "the thread that reads the batch of step %d has not ended within %g s and is "
                    "left behind; its open files stay open",
                    self._step,
                    MOST_CLOSE_SECONDS,
                )
                return
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self.batches.get_nowait()

    def _read(self) -> dict[str, jax.Array]:
        chunks = [
            (start, self._source.read(self._step, start, stop)) for start, stop in self._ranges
        ]
        batch = {name: self._array(name, chunks) for name in self._spec}
        self._step += 1
        return batch

    def _array(self, name: str, chunks: Sequence[tuple[int, dict[str, np.ndarray]]]) -> jax.Array:
        spec = self._spec[name]

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "the callback runs for addressable devices only"
            start, stop, _ = index[0].indices(spec.shape[0])
            first, chunk = next(
                pair for pair in reversed(chunks) if pair[0] <= start
            )  # Ranges do not overlap, so the last one that starts early enough holds the rows.
            return chunk[name][(slice(start - first, stop - first), *index[1:])]

        return jax.make_array_from_callback(
            spec.shape, self._shardings[name], shard, dtype=spec.dtype
        )


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns sorted ranges [start, stop) with touching or overlapping ranges merged."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return result
