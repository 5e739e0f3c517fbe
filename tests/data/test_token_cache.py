"""The cache: computed once, by one of several processes, and again when something changes."""

import json
import logging
import os
import subprocess
import sys
import time

import pytest

from shardlib.cache_root import cache_root
from shardlib.data import TextData, open_data
from shardlib.data.cache import cached
from shardlib.data.tokenizer import train_bpe
from shardlib.errors import DataError

PROGRAM = """
import logging, sys
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
logging.getLogger("jax").setLevel(logging.ERROR)
from shardlib.data import TextData, open_data
config = TextData(path=sys.argv[1], vocab_size=300, sequence_length=32)
print("ready", flush=True)
sys.stdin.readline()
source = open_data(config, global_batch=4, seed=0, split="train")
print(source.fingerprint, source.read(3, 0, 4)["tokens"].sum())
"""


def open_train(path, **options):
    settings = TextData(path=str(path), vocab_size=300, sequence_length=32, **options)
    return open_data(settings, global_batch=4, seed=0, split="train")


def built(caplog):
    """How often something was tokenised since the last call."""
    count = sum("tokenising" in record.message for record in caplog.records)
    caplog.clear()
    return count


def test_second_open_reads_the_cache(corpus, cache, caplog):
    caplog.set_level(logging.INFO, "shardlib")
    first = open_train(corpus)
    assert built(caplog) == 1
    files = {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}
    second = open_train(corpus)
    assert built(caplog) == 0
    assert first.read(0, 0, 4)["tokens"].tolist() == second.read(0, 0, 4)["tokens"].tolist()
    assert files == {file: file.stat().st_mtime_ns for file in cache.rglob("*") if file.is_file()}


def test_changes_are_noticed(corpus, caplog):
    caplog.set_level(logging.INFO, "shardlib")
    open_train(corpus)
    assert built(caplog) == 1
    longer = TextData(path=str(corpus), vocab_size=300, sequence_length=64)
    open_data(longer, global_batch=4, seed=5, split="train")
    assert built(caplog) == 0  # Neither the row length nor the seed matters to it.
    (corpus / "07.txt").write_text("changed " * 50)
    open_train(corpus)
    assert built(caplog) == 1
    os.utime(corpus / "07.txt", ns=(1, 1))
    open_train(corpus)
    assert built(caplog) == 1


@pytest.mark.mesh
def test_processes_that_start_together_share_the_work(corpus, cache):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(corpus)]
    processes = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("\n", timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    results = [output.splitlines()[-1] for output in outputs]
    assert results[0] == results[1]
    assert "".join(outputs).count("tokenising") == 1
    entries = [entry for entry in (cache / "tokens").iterdir() if entry.is_dir()]
    assert len(entries) == 1  # No temporary directory is left.


def test_a_failed_build_leaves_nothing(cache):
    def fail(directory):
        (directory / "half").write_text("written")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        cached("things", "key", fail, task="building")
    assert [entry for entry in (cache / "things").iterdir() if entry.is_dir()] == []
    folder = cached(
        "things", "key", lambda directory: (directory / "whole").write_text("yes"), task="building"
    )
    assert folder == cache / "things" / "key"
    assert (folder / "whole").read_text() == "yes"


def test_a_cache_built_meanwhile_is_taken(cache):
    def build(directory):
        # Another process on a file system without locks is faster.
        (cache / "things" / "key").mkdir()
        (cache / "things" / "key" / "whole").write_text("theirs")
        (directory / "whole").write_text("ours")

    assert (cached("things", "key", build, task="building") / "whole").read_text() == "theirs"


def test_a_tokenizer_with_two_tokens_of_one_id(tmp_path):
    """Bits per byte would be wrong."""
    content = json.loads(train_bpe(["ab"] * 20, 300).to_json())
    vocabulary = content["model"]["vocab"]
    vocabulary["ab"] = vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text("ab a")
    with pytest.raises(DataError) as caught:
        open_data(
            TextData(path=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json")),
            global_batch=4, seed=0, split="train",
        )  # fmt: skip
    # Of the two, the one whose length counts is up to the order of a hash table.
    assert str(caught.value) in [
        f"the tokens of a document of 4 bytes stand for {found} bytes.\n"
        "  Repair the tokenizer.json: each id must map to one token."
        for found in (3, 5)
    ]


def test_a_long_task_is_reported_while_it_runs(cache, monkeypatch, caplog):
    monkeypatch.setattr("shardlib.data.cache._REPORT_SECONDS", 0.01)
    cached("things", "key", lambda directory: time.sleep(0.1), task="counting")
    assert caplog.messages[0] == "counting, once, into the cache: 0.01 s so far"


def test_place_of_the_cache(monkeypatch, tmp_path):
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("SHARDLIB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "shardlib"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "shardlib"


def test_without_a_writable_home_the_cache_lasts_as_long_as_the_process(
    monkeypatch, tmp_path, caplog
):
    (tmp_path / "file").write_text("in the way")
    for name in ("SHARDLIB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    first, second = cache_root(), cache_root()
    assert first == second
    assert first.is_dir()
    [record] = caplog.records
    home = tmp_path / "file" / "home" / ".cache" / "shardlib"
    assert record.getMessage().startswith(f"{home} cannot be written: the cache is {first}")
    assert "SHARDLIB_CACHE" in record.getMessage()


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError) as caught:
        cached("things", "key", lambda directory: None, task="building")
    assert str(caught.value) == (
        f"the cache directory {tmp_path / 'file'} cannot be written: Not a directory.\n"
        f"  Set SHARDLIB_CACHE to a writable directory."
    )
