"""Sizes and checksums of files, and what is told of files that are not as they were."""

import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.checkpoint import checksums as files
from shardlib.checkpoint.checksums import (
    FileRecord,
    check_contents,
    check_sizes,
    checksums,
    combined,
)
from shardlib.errors import CheckpointError


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_checksums_of_pieces_give_that_of_the_whole(first, second):
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(
        first + second
    )


@pytest.mark.parametrize("part_bytes", [7, 100, 2**26])
def test_checksums_of_files_in_parts(part_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_PART_BYTES", part_bytes)
    contents = {"a": b"", "b/c": b"x", "b/d": os.urandom(1000), "e": os.urandom(700)}
    (tmp_path / "b").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert checksums(tmp_path, contents) == {
        name: FileRecord(len(content), f"{zlib.crc32(content):08x}")
        for name, content in contents.items()
    }


def test_all_faults_are_told_at_once(tmp_path):
    contents = {"a": b"12345", "b": b"12345", "c": b"12345", "d": b"12345"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    expected = checksums(tmp_path, contents)
    check_contents(tmp_path, expected)
    (tmp_path / "a").write_bytes(b"12346")
    (tmp_path / "d").write_bytes(b"02345")
    check_sizes(tmp_path, expected)
    check_contents(tmp_path, expected, largest=4)
    with pytest.raises(CheckpointError, match=r"(?s)2 of its files.*a: checksum.*d: checksum"):
        check_contents(tmp_path, expected)
    (tmp_path / "b").unlink()
    (tmp_path / "c").write_bytes(b"123")
    with pytest.raises(CheckpointError) as caught:
        check_contents(tmp_path, expected)
    assert str(caught.value).splitlines()[1:3] == ["  b: missing", "  c: 3 bytes instead of 5"]
