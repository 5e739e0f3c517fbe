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
    faults = ["'SL10' is not", "it has no 'place'", "'SL102' is not", "'wy' is", "'why' is not a"]
    every = "".join(f"(.|\n)*entry {n}: {fault}" for n, fault in enumerate(faults, start=1))
    with pytest.raises(ConfigError, match=f"{every}(.|\n)*\n  Correct it, or rewrite it"):
        read_baseline(path)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.json", b"[]", r" has no list 'accepted'\.\n  Write"),
        ("a.json", b"{", r" is not JSON: .*\n  Correct it"),
        ("a.yaml", b"{", ":1: not a YAML document"),
        ("a.yaml", b"accepted: !!python/name:os.system", "the tag !!python/name:os.system is not"),
        ("a.json", b"[" * 100_000, r" nests too deeply\.\n  Correct it"),
        ("a.json", b"\xff\xfe{", r" is not UTF-8 text\.\n  Rewrite it"),
    ],
    ids=["list", "not JSON", "not YAML", "tag", "deep", "not UTF-8"],
)
def test_a_file_that_is_no_baseline(tmp_path, name, text, match):
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=f"^the baseline {path}.*{match}"):
        read_baseline(path)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(ConfigError, match=r"none.json does not exist\.\n  Write it"):
        read_baseline(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\.\n  Name a file"):
        read_baseline(tmp_path)
    with pytest.raises(ConfigError, match=r"faults.json cannot be written: No such.*\n  Name a"):
        write_baseline(Baseline(), tmp_path / "nowhere" / "faults.json")
