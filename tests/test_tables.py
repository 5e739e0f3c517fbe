"""Tables fit a terminal of any width without breaking words."""

import pytest

from shardlib.tables import Table, aligned, captured

TABLE = Table(
    "parameters",
    ("parameter", "logical axes", "why", "per device>"),
    [
        (
            "layers/attention/query/kernel",
            "embed, heads",
            "metadata\nnot tensor: size 1",
            "2.0 MiB",
        ),
        ("layers/mlp/down/kernel", "mlp, embed", "-", "512.0 KiB"),
    ],
    ["state: 2.5 MiB on each device"],
)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_one_gets_whole_words(width):
    text = captured(TABLE, width=width)
    assert max(map(len, text.splitlines())) <= width
    words = {word.strip(",;") for word in text.split()}
    cells = [cell for row in TABLE.rows for cell in row if cell != "-"]
    assert {word.strip(",;") for cell in cells for word in cell.split()} <= words
    lines = [line.rstrip() for line in text.splitlines()]
    assert "layers/attention/query/kernel" in lines
    assert "layers/mlp/down/kernel" in lines


def test_columns_are_aligned():
    rows = [("name", "bytes"), ("a", "10"), ("long", "1")]
    assert aligned(rows, right=(1,)) == ["name  bytes", "a        10", "long      1"]
