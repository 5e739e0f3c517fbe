"""Files that are damaged, or declare more than they hold, or are made to exhaust a memory."""

import gzip
import json
import re
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from shardlib.data import ImageData, TextData, open_data, safe_gzip
from shardlib.data.cache import read_array
from shardlib.errors import DataError


def open_text(path, **options):
    config = TextData(path=str(path), tokenizer="bytes", sequence_length=16, **options)
    return open_data(config, global_batch=4, seed=0, split="train")


def message(path):
    with pytest.raises(DataError) as caught:
        open_text(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_bomb_is_refused_before_the_memory_is_used_up(tmp_path, monkeypatch, name):
    monkeypatch.setattr(safe_gzip, "MOST_BYTES_UNASKED", 1 << 22)
    file = tmp_path / name
    file.write_bytes(gzip.compress(b"a" * (1 << 26)))  # 64 MiB in 64 KiB
    size = file.stat().st_size
    most = max(200 * size, 1 << 22)
    tracemalloc.start()
    try:
        found = message(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == (
        f"{file} of {size:,} bytes decompresses to more than {most:,}, too large for text.\n"
        f"  Remove the file or, if it is valid, decompress it."
    )
    # What was read up to there in pieces and, once, in one piece.
    assert peak < 3 * most < 1 << 26


def test_text_that_repeats_itself_is_no_bomb(tmp_path):
    lines = [json.dumps({"text": "the same line of a log " * 4}) for _ in range(20_000)]
    packed = gzip.compress("\n".join(lines).encode())
    assert len("\n".join(lines)) > 200 * len(packed)
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    found, expected = (
        open_text(tmp_path / name, eval_fraction=0.0).read(0, 0, 4)["tokens"]
        for name in ("a.jsonl.gz", "a.jsonl")
    )
    np.testing.assert_array_equal(found, expected)


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-20], "Compressed file ended before the end-of-stream marker was "
         "reached"),
        (lambda content: b"plain text", r"Not a gzipped file \(b'pl'\)"),
        (flipped, "CRC check failed .*|Error -3 while decompressing data: .*"),
    ],
    ids=["cut short", "not gzip", "flipped"],
)  # fmt: skip
def test_damaged_gzip(tmp_path, damage, reason):
    file = tmp_path / "a.txt.gz"
    content = " ".join(map(str, np.random.default_rng(0).integers(0, 10**9, 500))).encode()
    file.write_bytes(damage(gzip.compress(content)))
    with pytest.raises(
        DataError,
        match=rf"^{file} cannot be decompressed: {reason}\.\n  Repair or remove the file\.$",
    ):
        open_text(file)


def test_a_line_that_nests_without_end(tmp_path):
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    assert message(tmp_path / "a.jsonl").startswith(
        f"{tmp_path}/a.jsonl:1: not JSON: maximum recursion depth exceeded"
    )


def png(width, height, data):
    """A grey image that declares any size."""

    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (png(50_000, 50_000, b""), "Image size (2500000000 pixels) exceeds limit of 178956970 "
         "pixels, could be decompression bomb DOS attack"),
        (png(9, 9, bytes(range(90))), "unrecognized data stream contents when reading image file"),
        # Pillow would hand it to Ghostscript.
        (POSTSCRIPT, "cannot identify image file"),
    ],
    ids=["bomb", "damaged", "postscript"],
)  # fmt: skip
def test_hostile_images(tmp_path, content, reason):
    for label in ("a", "b"):
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "x.png").write_bytes(content)
    config = ImageData(path=str(tmp_path / "set"), image_size=8, channels=1, eval_fraction=0.0)
    source = open_data(config, global_batch=1, seed=0, split="train")
    with pytest.raises(DataError) as caught:
        source.read(0, 0, 1)
    first, second = str(caught.value).split("\n")
    assert first.startswith(f"{tmp_path}/set/")
    assert f"x.png cannot be decoded: {reason}" in first
    assert second == "  Repair or remove the file."


def npy(shape, data, dtype="<i8"):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (npy((1 << 40,), bytes(16)), "mmap length is greater than file size"),
        (npy((2,), bytes(15)), "mmap length is greater than file size"),
        (npy((2,), b"", "|O"), "Array can't be memory-mapped: Python objects in dtype."),
        (b"", "EOF: reading magic string, expected 8 bytes got 0"),
    ],
)
def test_an_array_is_no_larger_than_its_file(tmp_path, content, reason):
    file = tmp_path / "x.npy"
    file.write_bytes(npy((2,), bytes(16)))
    assert read_array(file).tolist() == [0, 0]
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        read_array(file)


def cut(file):
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize("name", ["tokens", "offsets.npy", "meta.json"])
def test_a_damaged_cache_is_named(corpus, cache, name):
    open_text(corpus)
    (entry,) = (file.parent for file in cache.rglob("meta.json"))
    tokens = (entry / "tokens").stat().st_size // 2
    cut(entry / name)
    first, second = message(corpus).split("\n")
    assert first.startswith(f"{entry} in the cache is damaged: ")
    if name == "tokens":
        assert first.endswith(f": the file tokens holds {tokens - 4:,} of {tokens:,}.")
    assert second == "  Remove it; it will be rebuilt."
