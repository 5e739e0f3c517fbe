"""Accepted findings in a file."""

import pytest

from shardlib.errors import ConfigError
from shardlib.explain.lint import Finding
from shardlib.explain.lint.baseline import (
    Accepted,
    Baseline,
    baseline_of,
    read_baseline,
    write_baseline,
)

PLACE = "jvp()/dot_general in model.py:Block.__call__"
GATHER = Finding("SL102", PLACE, "rows are gathered", "cut them", "model.py:7")
LEAF = Finding("SL101", "layers/3/kernel", "it is whole", "cut it")
HOST = Finding("SL501", "debug_print", "the host", "return it", "model.py:9")


@pytest.mark.parametrize("name", ["accepted.json", "accepted.yaml"])
def test_written_read_and_judged(tmp_path, name):
    path = tmp_path / name
    write_baseline(baseline_of([GATHER, LEAF]), path)
    baseline = read_baseline(path)
    moved = Finding("SL102", PLACE, "more rows", "cut them", "model.py:70")
    judged = baseline.judge([moved, HOST])
    assert judged.new == (HOST,)
    assert judged.accepted == (moved,)
    assert judged.unused == (Accepted("SL101", "layers/3/kernel"),)
    assert str(judged.unused[0]) == "SL101 layers/3/kernel"


def test_a_star_covers_all_layers_and_brackets_are_names():
    every = Accepted("SL101", "layers/*/kernel")
    assert every.covers(LEAF)
    assert not every.covers(GATHER)
    assert not Accepted("SL102", "layers/*/kernel").covers(LEAF)
    odd = Finding("SL101", "blocks[ab]/kernel", "", "")
    assert Accepted("SL101", "blocks[ab]/kernel").covers(odd)
    assert not Accepted("SL101", "blocks[ab]/kernel").covers(
        Finding("SL101", "blocksa/kernel", "", "")
    )


def test_a_new_baseline_keeps_the_reasons_of_the_old_one():
    old = Baseline((Accepted("SL101", "layers/*/kernel", "small"), Accepted("SL203", "gone")))
    assert baseline_of([GATHER, LEAF, LEAF], old).entries == (
        Accepted("SL101", "layers/*/kernel", "small"),
        Accepted("SL102", PLACE),
    )


def test_entries_that_are_malformed_are_all_named(tmp_path):
    path = tmp_path / "accepted.json"
    path.write_text(
        '{"accepted": [{"code": "SL10", "place": "a"}, {"code": "SL101"}, "SL102", '
        '{"code": "SL101", "place": "a", "wy": "b"}, {"code": "SL101", "place": "a", "why": 3}]}'
    )
    with pytest.raises(ConfigError) as caught:
        read_baseline(path)
    assert str(caught.value) == (
        f"the baseline {path} is malformed:\n"
        "  entry 1: 'SL10' is not a code. Did you mean 'SL210'?\n"
        "  entry 2: it has no 'place'\n"
        "  entry 3: 'SL102' is not a mapping with 'code' and 'place'\n"
        "  entry 4: 'wy' is unknown. Did you mean 'why'?\n"
        "  entry 5: 'why' is not a string\n"
        "  Correct it, or rewrite it with --accept."
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[]", " has no list 'accepted'.\n  Write {\"accepted\": [{\"code\": "
         "\"SL105\", \"place\": \"layers[*]/mlp/up dot_general (forward) in model.py:*\"}]}."),
        ("a.json", "{", " is not JSON: Expecting property name enclosed in double quotes: line 1 "
         "column 2 (char 1).\n  Correct it, or rewrite it with --accept."),
        ("a.yaml", "{", ":1: not a YAML document: expected the node content, but found "
         "'<stream end>'."),
        ("a.yaml", "accepted: !!python/name:os.system", ":1: accepted: the tag "
         "!!python/name:os.system is not allowed here."),
        pytest.param("a.json", "[" * 100_000, " is not a list of findings: it nests too deeply.\n"
                     "  Correct it, or rewrite it with --accept.",
                     id="deep"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_baseline(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_baseline(path)
    assert str(caught.value) == f"the baseline {path}{message}"


def test_files_that_cannot_be_read_or_written(tmp_path):
    missing, folder, odd = tmp_path / "none.json", tmp_path / "a", tmp_path / "odd.json"
    folder.mkdir()
    odd.write_bytes(b"\xff\xfe{")
    for path, message in (
        (missing, f"the baseline {missing} does not exist.\n"
         "  Write it from the present faults with --accept."),
        (folder, f"the baseline {folder} cannot be read: Is a directory.\n  Name a file."),
        (odd, f"the baseline {odd} is not UTF-8 text.\n  Rewrite it with --accept."),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            read_baseline(path)
        assert str(caught.value) == message
    inside = tmp_path / "nowhere" / "faults.json"
    with pytest.raises(ConfigError) as caught:
        write_baseline(Baseline(), inside)
    assert str(caught.value) == (
        f"the baseline {inside} cannot be written: No such file or directory.\n"
        "  Name a file in a writable directory."
    )
