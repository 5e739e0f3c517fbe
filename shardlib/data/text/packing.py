"""Documents packed into rows of equal length, with random access to rows."""

import numpy as np

from shardlib.data.text.tokens import TokenArray
from shardlib.data.tokenizer import Tokenizer


def empty_row(sequence_length: int, eot: int) -> dict[str, np.ndarray]:
    """Returns a padding row with the layout of `PackedRows`."""
    return {
        "tokens": np.full(sequence_length, eot, np.int32),
        "targets": np.full(sequence_length, eot, np.int32),
        "segment_ids": np.zeros(sequence_length, np.int32),
        "positions": np.zeros(sequence_length, np.int32),
        "num_bytes": np.zeros((), np.int32),
    }


class PackedRows:
    """Rows over the stream `EOT document EOT document EOT ... document EOT`, in the order of the
    indices `documents`, `[num_documents] int64`.

    The tokens of row i start at `i * sequence_length` in the stream; its targets are the next
    tokens. Every token except the first EOT is a target exactly once per pass, and no document is
    truncated or dropped. One EOT ends a document and begins the next: it is the last target of the
    former and the first input of the latter. No target therefore lies in another document, and only
    the end of the last row has positions without a target.

    Examples (`length` = `sequence_length`):
        tokens: `[length] int32`.
        targets: `[length] int32`.
        segment_ids: `[length] int32`: the document pieces in the row, numbered from 1; 0 for
            positions without a target, which are excluded from attention and loss.
        positions: `[length] int32`, from 0 in each piece.
        num_bytes: `[] int32`: text bytes of the targets; 0 for EOT.
    """

    def __init__(
        self,
        array: TokenArray,
        documents: np.ndarray,
        sequence_length: int,
        tokenizer: Tokenizer,
    ):
        self._array = array
        self._length = sequence_length
        self._eot = tokenizer.eot
        self._table = tokenizer.token_num_bytes
        counts = np.diff(array.offsets)[documents] + 1
        # In the stream, document d follows the EOT at starts[d]; starts[-1] is the last EOT.
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # Stream position p of document d is index p + shifts[d] of the token array.
        self._shifts = np.append(array.offsets[documents], 0) - self._starts - 1

    @property
    def num_targets(self) -> int:
        """Number of targets in one pass: the tokens of all documents and one EOT per document."""
        return int(self._starts[-1])

    def __len__(self) -> int:
        return -(-self.num_targets // self._length)

    def padding(self) -> dict[str, np.ndarray]:
        """Returns a padding row."""
        return empty_row(self._length, self._eot)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        first = index * self._length
        last = min(first + self._length, self.num_targets)
        stream = np.arange(first, last + 1)
        document = np.searchsorted(self._starts, stream, side="right") - 1
        starts = self._starts[document]
        is_text = stream > starts
        places = (stream + self._shifts[document])[is_text]
        tokens = np.full(len(stream), self._eot, np.int32)
        tokens[is_text] = self._array.tokens[places]
        row = self.padding()
        count = last - first
        row["tokens"][:count] = tokens[:-1]
        row["targets"][:count] = tokens[1:]
        row["segment_ids"][:count] = (document - document[0] + 1)[:-1]
        row["positions"][:count] = (stream - np.maximum(starts, first))[:-1]
        # The first token of the row is a target of the previous row.
        places = places[1:] if is_text[0] else places
        row["num_bytes"] = np.array(self._count_bytes(tokens[1:], places), np.int32)
        return row

    def _count_bytes(self, targets: np.ndarray, places: np.ndarray) -> int:
        if self._table is not None:
            return int(self._table[targets].sum())
        assert self._array.num_bytes is not None
        return int(self._array.num_bytes[places].sum())


class Concatenation:
    """The rows of several `PackedRows` in a fixed shuffled order.

    Any prefix is a sample of the whole.
    """

    def __init__(self, parts: list[PackedRows], order: np.ndarray):
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self._order = order

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        row = int(self._order[index])
        part = int(np.searchsorted(self._ends, row, side="right"))
        return self._parts[part][row - int(self._ends[part]) + len(self._parts[part])]
