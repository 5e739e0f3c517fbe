import pytest
from run_lab import lab

__all__ = ["lab"]


@pytest.fixture(autouse=True)
def caches(lab, monkeypatch):
    """What the processes of these tests compile and read is kept among them."""
    monkeypatch.setenv("SHARDLIB_CACHE", str(lab.root / "cache"))
