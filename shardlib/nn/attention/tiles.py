"""Rows cut into tiles, for attention that does not compute all pairs at once."""

import jax
import numpy as np

AnyArray = jax.Array | np.ndarray

MAX_TILE = 512
"""Largest tile, in positions: one head's square of scores takes 1 MiB."""
_MIN_TILE = 64


def tile_size(length: int) -> int | None:
    """Returns the largest tile that divides `length`; None if no size from 64 to 512 does."""
    if length <= MAX_TILE:
        return length
    sizes = range(MAX_TILE, _MIN_TILE - 1, -1)
    return next((size for size in sizes if length % size == 0), None)


def needed_tile(size: int | None) -> int:
    """Returns `size`, which is not None: the choice of a method rejects other lengths."""
    assert size is not None
    return size


def cut(x: AnyArray, tile: int) -> AnyArray:
    """Cuts [batch, length] into [length / tile, batch, tile]."""
    return x.reshape(x.shape[0], -1, tile).swapaxes(0, 1)
