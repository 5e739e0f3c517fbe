"""Which part of an argument or a result each device holds, by its sharding."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from shardlib.explain.wrong_numbers.layout import Axis, Factor, Layout, unknown
from shardlib.explain.wrong_numbers.values import Context, Value
from shardlib.explain.wrong_numbers.vectors import APART

_TILED = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")


def by_sharding(sharding: Any, shape: Sequence[int], context: Context) -> Value | None:
    """Returns what a `NamedSharding` says of an array, or None for another kind.

    Args:
        sharding: The sharding.
        shape: Of the part on one device.
        context: That of the program.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    sizes = dict(sharding.mesh.shape)
    count = math.prod(sizes.values())
    if count != context.vectors.devices:
        return None
    coordinates = dict(
        zip(sizes, np.unravel_index(np.arange(count), [*sizes.values()]), strict=True)
    )
    tiles, counts = [], []
    for n in range(len(shape)):
        names = sharding.spec[n] if n < len(sharding.spec) else None
        names = (names,) if isinstance(names, str) else (names or ())
        tile = np.zeros(count, np.int64)
        for name in names:
            tile = tile * sizes[name] + coordinates[name]
        tiles.append(tile)
        counts.append(math.prod(sizes[name] for name in names))
    return _value(tiles, counts, shape, context)


def by_text(text: str, shape: Sequence[int], context: Context) -> Value | None:
    """Returns what a sharding as XLA writes it says of an array, or None where it is not read."""
    devices = context.vectors.devices
    if text.startswith("{replicated"):
        return _value([np.zeros(devices, np.int64)] * len(shape), [1] * len(shape), shape, context)
    found = _TILED.match(text)
    if found is None:
        return None
    grid = _ints(found[1])
    if found[4]:
        ids = np.array(_ints(found[4]))
    else:
        ids = np.arange(math.prod(_ints(found[2]))).reshape(_ints(found[2]))
        ids = (ids.transpose(_ints(found[3])) if found[3] else ids).reshape(-1)
    if ids.size != devices or len(grid) < len(shape):
        return None
    place = np.empty(devices, np.int64)
    place[ids] = np.arange(devices)
    tiles = np.unravel_index(place, grid)
    return _value(tiles[: len(shape)], grid[: len(shape)], shape, context)


def _value(
    tiles: Sequence[np.ndarray], counts: Sequence[int], shape: Sequence[int], context: Context
) -> Value:
    vectors = context.vectors
    dims = tuple((Factor(size, 1, n),) for n, size in enumerate(shape))
    axes = tuple(
        Axis(vectors.number(tile * size), size * count)
        for tile, size, count in zip(tiles, shape, counts, strict=True)
    )
    same = vectors.classes(np.stack(tiles, 1)) if len(tiles) else 0
    return Value(Layout(dims, axes), same)


def nothing_known(shape: Sequence[int]) -> Value:
    """Returns an array of which nothing is known."""
    return Value(unknown(shape), APART)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
