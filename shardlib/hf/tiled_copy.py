"""Copies of transposed arrays as fast as the cache allows."""

import math

import numpy as np

_TILE_ROWS = 256
_ROW_BYTES = 1024
_CACHE_LINE_BYTES = 64


def copy(out: np.ndarray, values: np.ndarray) -> None:
    """Copies an array into one of the same shape and dtype, in tiles if it is transposed.

    A transposed copy in one go reads each cache line once for each of its numbers. A tile is read
    by rows of `values` into a buffer of the cache, and written from there by rows of `out`.
    """
    assert out.dtype == values.dtype, "bits are copied"
    if out.itemsize <= 8:
        # numpy copies its own dtypes faster than bfloat16.
        bits = np.dtype(f"u{out.itemsize}")
        out, values = out.view(bits), values.view(bits)
    fastest = _by_stride(out)[-1:]
    order = _by_stride(values)
    if fastest == order[-1:]:
        out[...] = values
        return
    order = [*fastest, *(dim for dim in order if dim not in fastest)]
    _copy_tiles(out.transpose(order), values.transpose(order))


def _by_stride(array: np.ndarray) -> list[int]:
    """Returns the dims of an array from the slowest to the fastest."""
    return sorted(range(array.ndim), key=lambda dim: (array.shape[dim] > 1, -array.strides[dim]))


def _copy_tiles(out: np.ndarray, values: np.ndarray) -> None:
    """Copies an array whose first dim is the fastest of `out`, and whose last that of `values`."""
    num_rows, num_columns, *rest = values.shape
    size = max(1, math.prod(rest))
    width = max(1, _ROW_BYTES // (size * values.itemsize))
    # Rows at a distance of a power of two would share a few lines of the cache.
    padding = _CACHE_LINE_BYTES // values.itemsize
    buffer = np.empty((min(num_rows, _TILE_ROWS), width * size + padding), values.dtype)
    for row in range(0, num_rows, _TILE_ROWS):
        for column in range(0, num_columns, width):
            at = slice(row, row + _TILE_ROWS), slice(column, column + width)
            read = values[at]
            tile = buffer[: len(read), : read.shape[1] * size].reshape(read.shape)
            tile[...] = read
            out[at] = tile
