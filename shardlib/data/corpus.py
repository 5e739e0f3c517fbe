"""The embedded text corpus: the Python standard library's own source files."""

import os
import sysconfig
from pathlib import Path

from shardlib.errors import DataError, did_you_mean

BUILTIN = "builtin:"
_CORPORA = ("builtin:python",)
_IMAGE_SETS = ("builtin:digits",)
# Tests are repetitive, and installed packages differ between machines.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def builtin_files(name: str) -> list[Path]:
    """Returns the files of an embedded text corpus, in a fixed order.

    `builtin:python` is the `.py` files of the running Python's standard library (about 11 MB, PSF
    licence), without tests, installed packages and build configuration files.

    Raises:
        DataError: If no embedded corpus has this name, or this Python ships no source files.
    """
    if name in _IMAGE_SETS:
        raise DataError(f"{name!r} is a set of images, not text.\n  Set data.kind to images.")
    if name not in _CORPORA:
        raise DataError(
            f"no embedded corpus is called {name!r}.{did_you_mean(name, _CORPORA)}\n"
            f"  Choose {', '.join(_CORPORA)}, or give the path of a file or directory."
        )
    files = _python_files(Path(sysconfig.get_paths()["stdlib"]))
    if not files:
        raise DataError(
            f"{name!r} is empty: this Python has no source files in "
            f"{sysconfig.get_paths()['stdlib']}.\n"
            f"  Set data.path to a file or directory of text."
        )
    return files


def _python_files(root: Path) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _is_left_out(name)]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(files)


def _is_left_out(folder: str) -> bool:
    return folder in _LEFT_OUT or folder.startswith("config-")
