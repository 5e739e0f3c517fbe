"""Packed rows hold every document once, and no target lies in another document."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.data.text.packing import Concatenation, PackedRows
from shardlib.data.text.tokens import TokenArray
from shardlib.data.tokenizer import BytesTokenizer

TOKENIZER = BytesTokenizer()
DOCUMENTS = st.lists(st.text("ab é\n", min_size=1, max_size=12), min_size=1, max_size=8)


def token_array(texts, counted=False):
    """Tokens of some texts, with the bytes of each at hand if `counted`."""
    encoded = [encoding.ids for encoding in TOKENIZER.encode_documents(texts)]
    tokens = np.concatenate(encoded).astype(np.uint16)
    return TokenArray(
        tokens=tokens,
        num_bytes=np.ones(len(tokens), np.uint32) if counted else None,
        offsets=np.cumsum([0, *map(len, encoded)]),
        hashes=np.arange(len(texts), dtype=np.uint64),
        document_bytes=np.array([len(text.encode()) for text in texts]),
        fingerprint="",
    )


def packed(texts, length, order=None, tokenizer=TOKENIZER, counted=False):
    order = np.arange(len(texts)) if order is None else np.array(order)
    return PackedRows(token_array(texts, counted), order, length, tokenizer)


def joined(rows, name):
    """One array of all rows, without positions that have no target."""
    return np.concatenate([row[name][row["segment_ids"] > 0] for row in rows])


def test_rows_by_hand():
    rows = packed(["ab", "c", "defg"], 4)
    eot = TOKENIZER.eot
    a, b, c, d, e, f, g = b"abcdefg"
    assert len(rows) == 3
    assert rows.num_targets == 10
    expected = [
        ([eot, a, b, eot], [a, b, eot, c], [1, 1, 1, 2], [0, 1, 2, 0], 3),
        ([c, eot, d, e], [eot, d, e, f], [1, 2, 2, 2], [0, 0, 1, 2], 3),
        ([f, g, eot, eot], [g, eot, eot, eot], [1, 1, 0, 0], [0, 1, 0, 0], 1),
    ]
    for row, (tokens, targets, segments, positions, num_bytes) in zip(
        (rows[0], rows[1], rows[2]), expected, strict=True
    ):
        assert row["tokens"].tolist() == tokens
        assert row["targets"].tolist() == targets
        assert row["segment_ids"].tolist() == segments
        assert row["positions"].tolist() == positions
        assert row["num_bytes"] == num_bytes
        assert {value.dtype for value in row.values()} == {np.dtype(np.int32)}


@settings(deadline=None)
@given(texts=DOCUMENTS, length=st.integers(1, 20), data=st.data())
def test_rows_give_the_documents_back(texts, length, data):
    order = data.draw(st.permutations(range(len(texts))))
    source = packed(texts, length, order)
    rows = [source[index] for index in range(len(source))]
    stream = [TOKENIZER.eot]
    for index in order:
        stream += [*texts[index].encode(), TOKENIZER.eot]
    assert joined(rows, "tokens").tolist() == stream[:-1]
    assert joined(rows, "targets").tolist() == stream[1:]
    assert source.num_targets == len(stream) - 1
    assert sum(row["num_bytes"] for row in rows) == sum(len(text.encode()) for text in texts)


@settings(deadline=None)
@given(texts=DOCUMENTS, length=st.integers(1, 20))
def test_attention_and_loss_stay_within_a_document(texts, length):
    source = packed(texts, length)
    for index in range(len(source)):
        row = source[index]
        segments = row["segment_ids"]
        pieces = np.split(np.arange(length), np.flatnonzero(np.diff(segments)) + 1)
        numbers = [segments[piece[0]] for piece in pieces]
        assert numbers in (list(range(1, len(pieces) + 1)), [*range(1, len(pieces)), 0])
        for piece, number in zip(pieces, numbers, strict=True):
            if number == 0:
                continue
            assert row["positions"][piece].tolist() == list(range(len(piece)))
            # Inside a piece the next input is the target; EOT only begins one and only ends one.
            assert row["tokens"][piece[1:]].tolist() == row["targets"][piece[:-1]].tolist()
            assert TOKENIZER.eot not in row["tokens"][piece[1:]]
            assert TOKENIZER.eot not in row["targets"][piece[:-1]]


class _Counted(BytesTokenizer):
    """Bytes without a table, as for tokenizers that have none."""

    def __init__(self):
        super().__init__()
        self.token_num_bytes = None


@settings(deadline=None)
@given(texts=DOCUMENTS, length=st.integers(1, 20))
def test_counted_bytes_agree_with_the_table(texts, length):
    table = packed(texts, length)
    counted = packed(texts, length, tokenizer=_Counted(), counted=True)
    for index in range(len(table)):
        assert table[index]["num_bytes"] == counted[index]["num_bytes"]


def test_concatenation_holds_each_row_of_each_part_once():
    parts = [packed(["abcdefgh"], 3), packed(["ij"], 3)]
    both = Concatenation(parts, np.array([3, 1, 0, 2]))
    assert len(both) == 4
    found = [both[index]["tokens"].tolist() for index in range(4)]
    rows = [parts[0][0], parts[0][1], parts[0][2], parts[1][0]]
    assert found == [rows[index]["tokens"].tolist() for index in (3, 1, 0, 2)]
