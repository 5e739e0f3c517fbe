"""A cache of its own for each test, and small corpora."""

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The cache directory of the test, empty at first."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHARDLIB_CACHE", str(folder))
    return folder


@pytest.fixture
def corpus(tmp_path):
    """A directory of 40 different documents of about 300 bytes."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        words = [f"word{(number * 7 + k) % 23}" for k in range(40)]
        (folder / f"{number:02}.txt").write_text(f"document {number}\n" + " ".join(words))
    return folder
