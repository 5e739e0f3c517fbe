"""Whole examples packed into rows, with a mask of the targets that the loss counts."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Encodings:
    """All examples of a path, concatenated."""

    tokens: np.ndarray
    """`[num_tokens] uint32`, memory-mapped."""
    mask: np.ndarray
    """Whether the loss counts each token, `[num_tokens] bool`, memory-mapped."""
    offsets: np.ndarray
    """Starts of the examples, then the end of the last one: `[num_examples + 1] int64`."""
    hashes: np.ndarray
    """Hash of each example, `[num_examples] uint64`."""


def empty_row(sequence_length: int) -> dict[str, np.ndarray]:
    """Returns a padding row with the layout of `ExampleRows`."""
    names = ("tokens", "targets", "segment_ids", "positions", "loss_mask")
    return {name: np.zeros(sequence_length, np.int32) for name in names}


class ExampleRows:
    """Rows that hold whole examples, filled in the order of `chosen`, `[n] int64`; an example that
    does not fit begins the next, and one that is longer than a row is cut.

    Row arrays (`length` = `sequence_length`):
        tokens: `[length] int32`.
        targets: `[length] int32`: the next token of the same example.
        segment_ids: `[length] int32`: the examples in the row, numbered from 1; 0 for padding.
        positions: `[length] int32`, from 0 in each example.
        loss_mask: `[length] int32`: 1 where the loss counts the target, else 0.
    """

    def __init__(self, encodings: Encodings, chosen: np.ndarray, sequence_length: int):
        self._encodings = encodings
        self._chosen = chosen
        self._length = sequence_length
        sizes = np.diff(encodings.offsets)[chosen] - 1
        firsts, used = [], sequence_length
        for index, size in enumerate(np.minimum(sizes, sequence_length).tolist()):
            if used + size > sequence_length:
                firsts.append(index)
                used = 0
            used += size
        self._firsts = np.array([*firsts, len(chosen)], np.int64)

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row, place = empty_row(self._length), 0
        chosen = self._chosen[self._firsts[index] : self._firsts[index + 1]]
        for segment, example in enumerate(chosen, 1):
            start, stop = self._encodings.offsets[example : example + 2]
            stop = min(stop, start + self._length + 1)
            here = slice(place, place + int(stop - start) - 1)
            row["tokens"][here] = self._encodings.tokens[start : stop - 1]
            row["targets"][here] = self._encodings.tokens[start + 1 : stop]
            row["loss_mask"][here] = self._encodings.mask[start + 1 : stop]
            row["segment_ids"][here] = segment
            row["positions"][here] = np.arange(stop - start - 1)
            place = here.stop
        return row
