"""The cache directory of shardlib."""

import os
from pathlib import Path


def cache_root() -> Path:
    """Returns the cache directory: `SHARDLIB_CACHE`, or `~/.cache/shardlib` if it is unset."""
    chosen = os.environ.get("SHARDLIB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "shardlib"
