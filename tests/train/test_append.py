"""A file that is appended to while its disk is full."""

import contextlib
import itertools
import threading
import time

import pytest

from shardlib.log.durable_log import AppendFile


def test_a_full_disk_delays_what_is_written_and_says_so_once(tmp_path, small_files):
    said = []
    file = AppendFile(tmp_path / "log", warn=said.append)
    with small_files as limit:
        limit(20)  # Within the third line.
        for index in range(4):
            file.write(f"line {index} \n".encode())
        assert (tmp_path / "log").read_text() == "line 0 \nline 1 \nline"
        assert len(said) == 1
        assert said[0].startswith(f"{tmp_path}/log cannot be written: File too large.")
        limit(42)
        file.write(b"line 4 \n")
        assert (tmp_path / "log").read_text() == "".join(f"line {i} \n" for i in range(5))
        file.write(b"line 5 \n")
        assert said == 2 * said[:1]
        file.close()
        assert said[2:] == [f"{tmp_path}/log lacks its last 6 bytes: File too large."]


def test_what_waits_can_be_cut_too(tmp_path, small_files):
    file = AppendFile(tmp_path / "log")
    with small_files as limit:
        limit(5)
        for name in "abcd":
            file.write(f"{name}\n".encode())
        assert (tmp_path / "log").read_text() == "a\nb\nc"
        assert file.read() == b"a\nb\nc\nd\n"
        file.cut(6)
        assert file.read() == b"a\nb\nc\n"
        file.cut(2)
        assert file.read() == b"a\n"
        limit(100)
        file.write(b"e\n")
        file.close()
        assert (tmp_path / "log").read_text() == "a\ne\n"


def test_a_file_is_closed_between_two_writes(tmp_path):
    """Threads write until the file is closed: all that a write has taken is there, once."""
    file = AppendFile(tmp_path / "log", warn=pytest.fail)
    written = []

    def write(name):
        with contextlib.suppress(ValueError):
            for number in itertools.count():
                line = f"{name} {number}\n"
                file.write(line.encode())
                written.append(line)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    while len(written) < 300:
        time.sleep(0.001)
    file.close()
    for thread in threads:
        thread.join()
    lines = (tmp_path / "log").read_text().splitlines(keepends=True)
    assert sorted(lines) == sorted(written)
