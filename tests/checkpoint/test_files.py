"""Sizes and checksums of files, and what is told of files that are not as they were."""

import os
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.checkpoint import checksums as files
from shardlib.checkpoint.checksums import (
    FileRecord,
    checksums,
    combined,
)


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
