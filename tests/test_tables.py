"""Tables fit a terminal of any width without breaking words."""

import re
from pathlib import Path

import pytest

import shardlib
from shardlib.tables import Table, aligned, captured, fitted

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


def test_a_number_that_heads_a_row_gets_the_name_of_its_column():
    table = Table("", ("step>", "size>"), [("20", "1.0 MiB"), ("40", "3.5 MiB in several parts")])
    lines = ["step 20", "    size 1.0 MiB", "step 40", "    size 3.5 MiB in several parts"]
    assert [line.rstrip() for line in captured(table, width=34).splitlines()] == lines


def test_long_lines_are_folded_at_spaces():
    text = "a short line\n\n  one that is too long, with data=8,fsdp=16,tensor=2 in 2 GiB"
    assert fitted(text, 30).splitlines() == [
        "a short line",
        "",
        "  one that is too long, with",
        "      data=8,fsdp=16,tensor=2",
        "      in 2 GiB",
    ]


def test_columns_are_aligned():
    rows = [("name", "bytes"), ("a", "10"), ("long", "1")]
    assert aligned(rows, right=(1,)) == ["name  bytes", "a        10", "long      1"]


def test_one_module_formats_numbers():
    """Text that scales a number to a unit gets both from `shardlib.humanize`."""
    scaled = re.compile(r"\{[^{}]*(/ ?(2 ?\*\* ?[1-4]0|1024|1e(6|9|12|15))|\* ?1e[36])\b[^{}]*\}")
    package = Path(shardlib.__file__).parent
    found = [
        f"{file.relative_to(package)}:{number}: {line.strip()}"
        for file in package.rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if file.name != "humanize.py" and scaled.search(line)
    ]
    assert not found, "use shardlib.humanize:\n" + "\n".join(found)
