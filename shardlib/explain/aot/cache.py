"""On-disk cache of compiled programs as text.

JAX's own cache cannot be read without a device. An entry is gzipped JSON under the cache directory,
named by a digest of everything it depends on. An unreadable entry is rebuilt.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from shardlib.cache_root import cache_root

_FORMAT = 4
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program as cached. It is not stored if `warnings` is None, which means unknown."""

    text: str
    memory: dict[str, int]
    warnings: str | None
    compiled_for: str = ""
    """The cluster that `text` is for, if the program could not be compiled for its own chip."""


def program_key(lowered_hash: str, options: Iterable[str]) -> str:
    """Returns the cache key of a program: a digest of its code, compilers, flags and target."""
    parts = [str(_FORMAT), lowered_hash, *_versions(), *options, os.environ.get("XLA_FLAGS", "")]
    parts += [os.environ.get("LIBTPU_INIT_ARGS", ""), os.environ.get("JAX_OPTIMIZATION_LEVEL", "")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def cached(key: str, make: Callable[[], Program]) -> Program:
    """Returns the program stored under a key, or makes and stores it.

    The program is made each time if the cache directory is not writable or its warnings are
    unknown.
    """
    path = cache_root() / "programs" / f"{key}.json.gz"
    program = _read(path, key)
    if program is None:
        program = make()
        if program.warnings is None:
            return program
        with contextlib.suppress(OSError):
            _write(path, key, program)
    return program


def _versions() -> list[str]:
    versions = []
    for name in _COMPILERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name}=={importlib.metadata.version(name)}")
    return versions


def _read(path: Path, key: str) -> Program | None:
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        program = Program(
            text=data["text"],
            memory={str(name): int(value) for name, value in data["memory"].items()},
            warnings=data["warnings"],
            compiled_for=data["compiled_for"],
        )
    # The file is absent, truncated or not a cache entry.
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_ours = data.get("key") == key
    texts = (program.text, program.warnings, program.compiled_for)
    is_text = all(isinstance(text, str) for text in texts)
    return program if is_ours and is_text else None


def _write(path: Path, key: str, program: Program) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.dumps({"key": key, **dataclasses.asdict(program)})
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(gzip.compress(data.encode(), compresslevel=6, mtime=0))
        # The rename is atomic: readers see a whole entry or none.
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
