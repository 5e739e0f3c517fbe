"""Batches by step: what a training loop reads, whoever asks for which rows of it."""

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import jax
import numpy as np

from shardlib.data.config import ImageData, TextData
from shardlib.data.in_threads import in_threads
from shardlib.data.position import StreamPosition
from shardlib.data.tokenizer import Tokenizer
from shardlib.registry import DataSpec


class Source(Protocol):
    """Batches of examples, any step and any rows of it at once.

    The global batch of a step is a pure function of (config, seed, position, step), where the
    position says which sample of the stream comes first. Processes read disjoint or overlapping
    rows of it, so that their number does not change what is trained on, and a run that resumes
    needs no other state.
    """

    @property
    def spec(self) -> DataSpec:
        """What a model must know of the data."""
        ...

    @property
    def global_batch(self) -> int:
        """Rows in a batch, over all processes."""
        ...

    @property
    def num_steps(self) -> int | None:
        """The step at which the pass is over; None where there is no end."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal data: a resumed run compares it with the one it was started on."""
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


class MapSource:
    """A `Source` over examples by index: row r of step k is example `k * global_batch + r`, and
    with a position of its own example `position.samples_at(k, global_batch) + r`.

    The examples may be any sequence whose items are functions of their index alone, such as a
    `grain.MapDataset` (shuffled, mixed, mapped and repeated as one likes) of dicts of arrays.

    Args:
        make_examples: Returns the sequence. Called at the first `read`, in the thread that reads:
            importing Grain takes longer than all else here, and a compiler can run meanwhile.
        spec: What a model must know of the data.
        global_batch: Rows in a batch.
        padding: An example that stands for no example (text: segment ids 0; images: label -1). It
            tells shapes and dtypes too, and fills the last batch of a pass.
        num_examples: Examples in one pass; None if there is no end.
        max_steps: Most batches in one pass.
        fingerprint: Equal for equal data.
        tokenizer: Where the examples are text.
        threads: Examples made at a time; more than one where making them is slow.

    Raises:
        ValueError: If `global_batch` is less than 1.
    """

    def __init__(
        self,
        make_examples: Callable[[], Any],
        *,
        spec: DataSpec,
        global_batch: int,
        padding: Mapping[str, np.ndarray],
        num_examples: int | None = None,
        max_steps: int | None = None,
        fingerprint: str = "",
        tokenizer: Tokenizer | None = None,
        threads: int = 1,
    ):
        if global_batch < 1:
            raise ValueError(f"global_batch must be at least 1, not {global_batch}")
        self.spec = spec
        self.global_batch = global_batch
        self.fingerprint = fingerprint
        self.tokenizer = tokenizer
        self.num_examples = num_examples
        self._max_steps = max_steps
        self._padding = dict(padding)
        self._make_examples = make_examples
        self._examples: Any = None
        self._lock = threading.Lock()
        self._threads = threads
        self._position = StreamPosition()

    def at(self, position: StreamPosition) -> "MapSource":
        """Returns this source with its stream moved, so that the batch of step `position.step`
        begins with example `position.samples_seen`. Earlier steps are not there."""
        moved = copy.copy(self)
        moved._position = position
        return moved

    @property
    def num_steps(self) -> int | None:
        """The step at which the pass is over, its last batch padded; None where there is no end."""
        if self.num_examples is None:
            return self._max_steps
        left = max(0, self.num_examples - self._position.samples_seen)
        steps = self._position.step - (-left // self.global_batch)
        return steps if self._max_steps is None else min(steps, self._max_steps)

    def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of each array of a global batch."""
        return batch_of(self._padding, self.global_batch)

    def read(self, step: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns rows [start, stop) of the global batch of a step, as arrays of their own.

        Raises:
            ValueError: If there is no such step or row.
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

    def _example(self, index: int) -> Mapping[str, np.ndarray]:
        if self.num_examples is not None and index >= self.num_examples:
            return self._padding
        with self._lock:
            if self._examples is None:
                self._examples = self._make_examples()
        return self._examples[index]


def open_data(
    config: TextData | ImageData, *, global_batch: int, seed: int, split: Literal["train", "eval"]
) -> MapSource:
    """Returns the batches of a config.

    Text: `tokens`, `targets`, `segment_ids`, `positions`: `[global_batch, sequence_length] int32`,
    and `num_bytes: [global_batch] int32`; see `packing.PackedRows`. Images: `images:
    [global_batch, height, width, channels] float32`, `labels: [global_batch] int32`.

    Training goes on for ever, in a new order in each pass. Evaluation is one pass over what is
    held out, the same for all seeds. Its last batch is padded: rows whose segment ids are all 0, or
    whose label is -1, stand for no example.

    Args:
        config: What to read.
        global_batch: Rows in a batch, over all processes.
        seed: Sets the order of training.
        split: `train` or `eval`.

    Raises:
        DataError: If the data is missing, empty, malformed or too small, or nothing is held out.
        MissingExtraError: If images are asked for and the extra `images` is not installed.
    """
    if isinstance(config, TextData):
        from shardlib.data.text import open_text

        return open_text(config, global_batch=global_batch, seed=seed, split=split)
    from shardlib.data.images import open_images

    return open_images(config, global_batch=global_batch, seed=seed, split=split)
