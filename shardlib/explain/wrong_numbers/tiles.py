"""Layouts of arguments and results, derived from their shardings."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from shardlib.explain.wrong_numbers.layout import Axis, Factor, Layout, unknown
from shardlib.explain.wrong_numbers.values import Context, Value
from shardlib.explain.wrong_numbers.vectors import APART
from shardlib.mesh import entry_axes

Spec = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of an array."""

_TILED = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")


def axes_of(sharding: Any, rank: int, mesh: Mapping[str, int]) -> Spec | None:
    """Returns the mesh axes of each dim of a `NamedSharding` on the mesh, or None for any other.

    Args:
        sharding: The sharding.
        rank: Rank of the array.
        mesh: Sizes of the mesh axes, in mesh order.
    """
    if not isinstance(sharding, NamedSharding) or list(sharding.mesh.shape.items()) != [
        *mesh.items()
    ]:
        return None
    entries = [entry_axes(entry) for entry in sharding.spec]
    return tuple(tuple(entry) for entry in entries) + ((),) * (rank - len(entries))


def by_axes(
    spec: Spec, mesh: Mapping[str, int], shape: Sequence[int], context: Context
) -> Value | None:
    """Returns the value of an array with the given mesh axes, or None if they do not fit.

    Args:
        spec: Mesh axes of each dim.
        mesh: Sizes of the mesh axes, in mesh order.
        shape: Shape on one device.
        context: Context of the program.
    """
    return context.once(_by_axes, spec, tuple(mesh.items()), tuple(shape))


def _by_axes(
    spec: Spec, axes: tuple[tuple[str, int], ...], shape: tuple[int, ...], context: Context
) -> Value | None:
    mesh = dict(axes)
    count = math.prod(mesh.values())
    if count != context.vectors.devices or len(spec) != len(shape):
        return None
    places = np.unravel_index(np.arange(count), tuple(mesh.values()))
    coordinates = dict(zip(mesh, places, strict=True))
    tiles = []
    for names in spec:
        tile = np.zeros(count, np.int64)
        for name in names:
            tile = tile * mesh[name] + coordinates[name]
        tiles.append(tile)
    counts = [math.prod(mesh[name] for name in names) for names in spec]
    return _value(tiles, counts, shape, context)


def by_text(text: str, shape: Sequence[int], context: Context) -> Value | None:
    """Returns the value of an array with a sharding in XLA's text form, or None if unreadable."""
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
    """Returns the value of an array with an unknown layout."""
    return Value(unknown(shape), APART)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
