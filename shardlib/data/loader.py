"""Sources of batches by step, whose rows can be read independently."""

import copy
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from shardlib.data.hashing import derive_seed
from shardlib.data.tokenizer import Tokenizer
from shardlib.errors import DataError
from shardlib.registry import DataSpec


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """At optimizer step `step` a run has consumed the first `samples_seen` samples of its stream.

    Each later step takes the next `global_batch` samples, whatever that number was before, and
    however many processes, devices or mesh axes read them. Skipped samples count as seen. A sample
    is one row of a batch: a packed row of text or an image.
    """

    step: int = 0
    samples_seen: int = 0

    def __post_init__(self) -> None:
        if self.step < 0 or self.samples_seen < 0:
            raise ValueError(f"neither part of a position may be negative: {self}")

    def samples_at(self, step: int, global_batch: int) -> int:
        """Returns the samples seen at a later step, with equal batches from here on.

        Raises:
            ValueError: If the step is before this position.
        """
        if step < self.step:
            raise ValueError(f"step {step} lies before step {self.step}, where the stream begins")
        return self.samples_seen + (step - self.step) * global_batch


class Examples(Protocol):
    """A sequence of dicts of arrays that depend only on their index."""

    def __getitem__(self, index: int, /) -> Any: ...


class Source(Protocol):
    """Batches of examples with random access to steps and rows.

    The global batch of a step is a pure function of (config, seed, position, step), where the
    position gives the first sample of the stream. Processes may read disjoint or overlapping rows
    of it. The number of processes therefore does not change the training data, and a resumed run
    needs no other state.
    """

    @property
    def spec(self) -> DataSpec:
        """Properties of the data that a model depends on."""
        ...

    @property
    def global_batch(self) -> int:
        """Rows in a batch, over all processes."""
        ...

    @property
    def num_steps(self) -> int | None:
        """The step at which the pass ends; None for an endless stream."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for equal data; a resumed run compares it with its saved one."""
        ...

    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of each array of a global batch."""
        ...

    def read(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns rows [start, stop) of the global batch of a step."""
        ...


def batch_of(
    example: Mapping[str, np.ndarray], global_batch: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array of a batch of such examples."""
    return {
        name: jax.ShapeDtypeStruct((global_batch, *value.shape), value.dtype)
        for name, value in example.items()
    }


@dataclasses.dataclass(frozen=True)
class _Mapped:
    examples: Examples
    change: Callable[[int, Any], Mapping[str, np.ndarray]]

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.change(index, self.examples[index])


class MapSource:
    """A `Source` over examples by index: row r of step k is example `k * global_batch + r`.

    After `at(position)` it is example `position.samples_at(k, global_batch) + r`.

    The examples may be any sequence whose items depend only on their index, such as a
    `grain.MapDataset` (shuffled, mixed, mapped or repeated) of dicts of arrays.

    Args:
        make_examples: Returns the sequence. It is called at the first `read`, in the reading
            thread: importing Grain takes most of the time here, and a compiler can run meanwhile.
        spec: Properties of the data that a model depends on.
        global_batch: Rows in a batch.
        padding: A placeholder for a missing example (text: segment ids 0; images: label -1). It
            also gives shapes and dtypes, and fills the last batch of a pass.
        num_examples: Examples in one pass; None for an endless stream.
        max_steps: Maximum batches in one pass.
        fingerprint: A digest that is equal for equal data.
        tokenizer: The tokenizer of text examples.
        threads: Examples computed in parallel; more than one helps if they are slow.
        score: `score(rows)` returns metrics of a pass from what the loss returns for its rows, as
            `shardlib.losses.Output`s by name: arrays [n, ...] of the first n examples.

    Raises:
        DataError: If `global_batch` is less than 1.
    """

    def __init__(
        self,
        make_examples: Callable[[], Examples],
        *,
        spec: DataSpec,
        global_batch: int,
        padding: Mapping[str, np.ndarray],
        num_examples: int | None = None,
        max_steps: int | None = None,
        fingerprint: str = "",
        tokenizer: Tokenizer | None = None,
        threads: int = 1,
        score: Callable[[Mapping[str, np.ndarray]], dict[str, float]] | None = None,
    ):
        if global_batch < 1:
            raise DataError(
                f"global_batch must be at least 1, not {global_batch}.\n"
                "  Give the rows in a batch over all processes."
            )
        self.spec = spec
        self.global_batch = global_batch
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.num_examples = num_examples
        self._max_steps = max_steps
        self._padding = dict(padding)
        self._make_examples = make_examples
        self._examples: Examples | None = None
        self._lock = threading.Lock()
        self._threads = threads
        self._score = score
        self._position = StreamPosition()

    def at(self, position: StreamPosition) -> "MapSource":
        """Returns this source moved to a position, without earlier steps.

        The batch of step `position.step` begins with example `position.samples_seen`.
        """
        moved = copy.copy(self)
        moved._position = position
        return moved

    def mapped(
        self,
        change: Callable[[int, Any], Mapping[str, np.ndarray]],
        *,
        spec: DataSpec,
        padding: Mapping[str, np.ndarray],
        fingerprint: str,
    ) -> "MapSource":
        """Returns this source with changed examples: `change(index, example)` in place of each.
        `change` is pure; the index differs from pass to pass of an endless stream. `padding` is
        already changed, and `fingerprint` is of data and change."""
        mapped, make = copy.copy(self), self._make_examples
        mapped.spec, mapped.fingerprint = spec, fingerprint
        mapped._padding = dict(padding)
        mapped._make_examples = lambda: _Mapped(make(), change)
        return mapped

    @property
    def num_steps(self) -> int | None:
        """The step at which the pass ends; its last batch is padded. None for an endless stream."""
        if self.num_examples is None:
            return self._max_steps
        left = max(0, self.num_examples - self._position.samples_seen)
        steps = self._position.step - (-left // self.global_batch)
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of each array of a global batch."""
        return batch_of(self._padding, self.global_batch)

    def read(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns rows [start, stop) of the global batch of a step, as new arrays.

        Raises:
            ValueError: If the step or the rows do not exist.
        """
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            raise ValueError(f"no step {step} in a pass of {self.num_steps} steps")
        first = self._position.samples_at(step, self.global_batch)
        if not 0 <= start <= stop <= self.global_batch:
            raise ValueError(f"no rows [{start}, {stop}) in a batch of {self.global_batch}")
        batch = {
            name: np.empty((stop - start, *value.shape), value.dtype)
            for name, value in self._padding.items()
        }

        def fill(row: int) -> None:
            example = self._example(first + start + row)
            for name, values in batch.items():
                values[row] = example[name]

        in_threads(fill, stop - start, threads=self._threads)
        return batch

    def score(self, rows: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns metrics of a pass from arrays [m, ...] for the rows of its first batches.

        Each example counts once: rows of padding are left out. A source without `score` has no such
        metrics.
        """
        if self._score is None:
            return {}
        return self._score({name: values[: self.num_examples] for name, values in rows.items()})

    def _example(self, index: int) -> Mapping[str, np.ndarray]:
        if self.num_examples is not None and index >= self.num_examples:
            return self._padding
        with self._lock:
            if self._examples is None:
                self._examples = self._make_examples()
        return self._examples[index]


def in_order(rows: Examples, seed: int, split: str) -> Callable[[], Examples]:
    """Returns `make_examples` of `MapSource` for rows: endless and shuffled in each pass to train
    on, as they are to evaluate on."""
    return functools.partial(_endless if split == "train" else _plain, rows, seed)


def _endless(rows: Any, seed: int) -> Examples:
    import grain

    return grain.MapDataset.source(rows).shuffle(seed=derive_seed(seed, "rows")).repeat()


def _plain(rows: Examples, _: int) -> Examples:
    return rows


def in_threads(work: Callable[[int], None], count: int, *, threads: int) -> None:
    """Calls `work` on each index of `range(count)` in parallel, and waits for all calls.

    The threads are daemons. Python joins the threads of `concurrent.futures` at exit, but a thread
    that waits for a dead file system must not keep the process alive. One thread is the caller's
    own.

    Raises:
        BaseException: The error of `work` with the lowest index. Calls that have not started by
            then are skipped.
    """
    if threads == 1 or count <= 1:
        for index in range(count):
            work(index)
        return
    indices: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(count):
        indices.put(index)
    errors: dict[int, BaseException] = {}

    def run() -> None:
        while not errors:
            try:
                index = indices.get_nowait()
            except queue.Empty:
                return
            try:
                work(index)
            except BaseException as error:  # The caller must see every error.
                errors[index] = error

    started = [
        threading.Thread(target=run, name="shardlib-read", daemon=True)
        for _ in range(min(threads, count))
    ]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[min(errors)]
