"""Inputs and answers, each in a row of its own."""

import numpy as np

from shardlib.data.instruct.packing import Encodings


def empty_row(sequence_length: int, target_length: int) -> dict[str, np.ndarray]:
    """Returns a row of padding with the layout of `PairRows`."""
    return {
        "tokens": np.zeros(sequence_length, np.int32),
        "segment_ids": np.zeros(sequence_length, np.int32),
        "targets": np.zeros(target_length, np.int32),
        "target_segment_ids": np.zeros(target_length, np.int32),
    }


def pair_sizes(encodings: Encodings) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of the input and of the answer of each example: [num_examples] int64."""
    sizes = np.diff(encodings.offsets)
    answers = np.add.reduceat(encodings.mask.astype(np.int64), encodings.offsets[:-1])
    return sizes - answers, answers


class PairRows:
    """Rows of one example each, in the order of `chosen`, `[n] int64`: its input, and its answer,
    which the loss counts. What is longer than a row is cut.

    Row arrays:
        tokens, segment_ids: `[sequence_length] int32`: the input; 1, and 0 for padding.
        targets, target_segment_ids: `[target_length] int32`: the same of the answer.
    """

    def __init__(
        self, encodings: Encodings, chosen: np.ndarray, sequence_length: int, target_length: int
    ):
        self._encodings = encodings
        self._chosen = chosen
        self._lengths = sequence_length, target_length

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row, example = empty_row(*self._lengths), self._chosen[index]
        here = slice(*self._encodings.offsets[example : example + 2])
        tokens, learned = self._encodings.tokens[here], self._encodings.mask[here]
        for name, ids, part in (
            ("tokens", "segment_ids", tokens[~learned]),
            ("targets", "target_segment_ids", tokens[learned]),
        ):
            part = part[: len(row[name])]
            row[name][: len(part)] = part
            row[ids][: len(part)] = 1
        return row
