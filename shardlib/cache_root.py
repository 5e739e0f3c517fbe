"""The cache directory of shardlib."""

import atexit
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

_logger = logging.getLogger(__name__)


def cache_root() -> Path:
    """Returns the cache directory: `SHARDLIB_CACHE`, or `~/.cache/shardlib` if it is unset.

    A machine without a writable home gets a temporary directory, which lasts as long as the
    process; a warning says so once.
    """
    chosen = os.environ.get("SHARDLIB_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    root = (Path(base) if base else Path(os.path.expanduser("~")) / ".cache") / "shardlib"
    return root if _is_writable(root) else _temporary(root)


def _is_writable(root: Path) -> bool:
    existing = next(path for path in (root, *root.absolute().parents) if os.path.exists(path))
    return existing.is_dir() and os.access(existing, os.W_OK)


@functools.cache
def _temporary(root: Path) -> Path:
    path = Path(tempfile.mkdtemp(prefix="shardlib-cache-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    _logger.warning(
        "%s cannot be written: the cache is %s and is removed when this process ends. Set "
        "SHARDLIB_CACHE to a writable directory to keep it.",
        root,
        path,
    )
    return path
