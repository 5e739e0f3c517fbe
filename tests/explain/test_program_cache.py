"""Compiled programs kept as text: read back whole, or made anew."""

import dataclasses
import gzip
import json

import pytest

from shardlib.explain.cache import Program, cached, program_key

PROGRAM = Program("HloModule m, é\n", {"peak": 3}, "W1121 careful\n", "v5p-32")
KEY = program_key("hash", ["v5e-8"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    return tmp_path / "programs"


def never():
    raise AssertionError("it is kept already")


def test_it_is_made_once(folder):
    assert cached(KEY, lambda: PROGRAM) == PROGRAM
    assert cached(KEY, never) == PROGRAM
    (file,) = folder.iterdir()
    assert json.loads(gzip.decompress(file.read_bytes()))["memory"] == {"peak": 3}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b"not JSON"),
        gzip.compress(b"[1, 2]"),
        gzip.compress(b'{"text": "HloModule"}'),
        gzip.compress(b'{"key": "K", "text": 1, "memory": {}, "warnings": ""}'),
        gzip.compress(b'{"key": "K", "text": "t", "memory": {"peak": "x"}, "warnings": ""}'),
        gzip.compress(b'{"key": "another", "text": "t", "memory": {}, "warnings": ""}'),
        gzip.compress(b'{"key": "K", "text": "t", "memory": {}, "warnings": ""}')[:-9],
    ],
)
def test_what_cannot_be_read_is_made_anew(folder, content):
    folder.mkdir()
    file = folder / f"{KEY}.json.gz"
    file.write_bytes(content.replace(b'"K"', json.dumps(KEY).encode()))
    assert cached(KEY, lambda: PROGRAM) == PROGRAM
    assert cached(KEY, never) == PROGRAM


def test_a_directory_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path / "file"))
    assert cached(KEY, lambda: PROGRAM) == PROGRAM
    with pytest.raises(AssertionError, match="kept already"):
        cached(KEY, never)


def test_a_program_whose_warnings_are_not_known_is_not_kept(folder):
    hidden = dataclasses.replace(PROGRAM, warnings=None)
    assert cached(KEY, lambda: hidden) == hidden
    assert not folder.exists()
    assert cached(KEY, lambda: PROGRAM) == PROGRAM
    assert cached(KEY, never) == PROGRAM


def test_whatever_changes_the_program_changes_the_key(monkeypatch):
    keys = {KEY, program_key("other", ["v5e-8"]), program_key("hash", ["v5e-16"])}
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        monkeypatch.setenv(name, "--another")
        keys.add(program_key("hash", ["v5e-8"]))
    assert len(keys) == 5
