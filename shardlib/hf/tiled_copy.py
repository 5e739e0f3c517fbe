"""Copies of transposed arrays as fast as the cache allows."""

import numpy as np

_TILE_ROWS = 256


def copy(out: np.ndarray, values: np.ndarray) -> None:
    """Copies an array in tiles into one of the same shape and dtype.

    A transposed copy in one go reads each cache line once for each of its numbers.
    """
    assert out.dtype == values.dtype, "bits are copied"
    if out.itemsize <= 8:
        # numpy copies its own dtypes faster than bfloat16.
        bits = np.dtype(f"u{out.itemsize}")
        out, values = out.view(bits), values.view(bits)
    slowest = int(np.argmax(values.strides)) if values.ndim else 0
    if not values.ndim or slowest == int(np.argmax(out.strides)):
        out[...] = values
        return
    tile = [slice(None)] * values.ndim
    for start in range(0, values.shape[slowest], _TILE_ROWS):
        tile[slowest] = slice(start, start + _TILE_ROWS)
        out[tuple(tile)] = values[tuple(tile)]
