"""Rows cut into tiles, by which attention goes where it does not compute all pairs at once."""

import jax
import numpy as np

Array = jax.Array | np.ndarray

MAX_TILE = 512
"""Positions of a tile at most: a square of scores of one head takes 1 MiB."""
_MIN_TILE = 64


def tile_size(length: int) -> int | None:
    """Returns the largest tile that divides `length`; None if there is none of a sensible size."""
    if length <= MAX_TILE:
        return length
    sizes = range(MAX_TILE, _MIN_TILE - 1, -1)
    return next((size for size in sizes if length % size == 0), None)


def needed_tile(size: int | None) -> int:
    """Returns `size`. Lengths that cannot be cut are refused where a method is chosen."""
    assert size is not None
    return size


def cut(x: Array, tile: int) -> Array:
    """Cuts [batch, length] into [length / tile, batch, tile]."""
    return x.reshape(x.shape[0], -1, tile).swapaxes(0, 1)
