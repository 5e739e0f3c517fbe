"""Sums of attention to pages on a CPU, by a kernel that the C++ compiler of the machine compiles.

XLA copies the pages of a block before a product reads them, which takes as long as the product.
The kernel reads them where they lie, once for all rows that share a table.

XLA calls it by its foreign function interface: https://docs.jax.dev/en/latest/ffi.html
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.cache_root import cache_root

VECTOR = 16
"""Numbers that the kernel computes together: it divides the dims of a value."""
_TARGET = "shardlib_page_sums"
_SOURCE = Path(__file__).with_name("page_sums.cc")
_OPTIONS = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-w"]
# Sums may be taken in any order; a NaN stays one.
_OPTIONS += ["-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]
_OPTIONS += ["-ffp-contract=fast"]


class PageSums(NamedTuple):
    """Softmax sums of a row, or of rows, float32: the largest score and the sum of exponentials
    [*rows, kv_heads, group], and the sum of values [*rows, kv_heads, group, value_dim]."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array


def page_sums(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    layer: int | jax.Array,
    first: jax.Array,
    last: jax.Array,
    tables: jax.Array,
) -> PageSums:
    """Returns the sums of rows over the positions that they see.

    Args:
        query: Scaled queries [rows, kv_heads, group, head_dim] float32.
        key, value: The pages [layers, 1, pages, kv_heads, page_size, dims] float32. The dims of
            values are a multiple of `VECTOR`.
        layer: The layer, an int32 scalar.
        first, last: The positions that rows see, both included: [rows] int32.
        tables: The pages of each row [rows, pages_a_row] int32, or of each lane: of as many rows,
            one after the other, as there are for each table.
    """
    rows, dims = query.shape[:3], ((), (), value.shape[5:])
    results = [jax.ShapeDtypeStruct((*rows, *of_row), np.float32) for of_row in dims]
    # The kernel checks no place.
    layers, _, num_pages, _, page_size, _ = key.shape
    layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, layers - 1)
    last = jnp.minimum(last, tables.shape[1] * page_size - 1)
    first, tables = jnp.maximum(first, 0), jnp.clip(tables, 0, num_pages - 1)
    call = jax.ffi.ffi_call(_TARGET, results)
    return PageSums(*call(query, key, value, layer, first, last, tables))


@functools.cache
def has_page_kernel() -> bool:
    """Returns whether XLA has the kernel, which is compiled once for each machine; it has none
    where there is no C++ compiler. It warns if the kernel does not compile."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if not compiler or shutil.which(compiler[0]) is None:
        return False
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "").strip() or error
        warnings.warn(
            "attention to pages is computed by XLA, which takes longer: the C++ compiler "
            f"{shlex.join(compiler)} fails: {reason}\n  Set CXX to another one, or to '' for none.",
            stacklevel=2,
        )
        return False
    handler = jax.ffi.pycapsule(library.PageSumsHandler)
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
    return True


def _compiled(compiler: list[str]) -> Path:
    """Returns the library, from the cache if it was compiled before for such a machine."""
    known = [_SOURCE.read_text(), *_OPTIONS, *compiler, jax.__version__, platform.machine(), _cpu()]
    key = hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
    path = cache_root() / "kernels" / f"page_sums-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may compile it as well, each into a file of its own.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            options = [*_OPTIONS, "-I", jax.ffi.include_dir(), str(_SOURCE), "-o", str(made)]
            command = [*compiler, *options]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(path)
    return path


def _cpu() -> str:
    """Returns what tells the instructions that a CPU has: machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
