"""A cache of compiled programs for one test."""

import pytest


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("SHARDLIB_CACHE", str(folder))
    return folder / "programs"
