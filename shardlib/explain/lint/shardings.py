"""Mesh axes of a program argument, from its sharding text or from its shape on one device."""

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np

from shardlib.explain.hlo.replica_groups import as_groups, groups_of_axes

Spec = tuple[tuple[str, ...], ...]

_TILED = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))")


def spec_of_text(text: str, rank: int, mesh: Mapping[str, int]) -> Spec | None:
    """Returns the mesh axes that shard each dim, or None if the text does not determine them.

    Args:
        text: Sharding such as `{devices=[4,1,2]<=[8] last_tile_dim_replicate}`.
        rank: Number of dims of the array.
        mesh: Sizes of the mesh axes.
    """
    if text in ("{replicated}", "{maximal device=0}"):
        return ((),) * rank
    found = _TILED.search(text)
    if found is None:
        return None
    tiles = _ints(found[1])
    ids = np.array(_ints(found[4])) if found[4] else _iota(_ints(found[2]), found[3])
    if math.prod(tiles) != ids.size or len(tiles) < rank:
        return None
    ids = ids.reshape(tiles)
    axes = groups_of_axes(mesh)
    spec = []
    for dim in range(rank):
        rows = np.moveaxis(ids, dim, -1).reshape(-1, tiles[dim])
        named = axes.get(as_groups(rows.tolist())) if tiles[dim] > 1 else ()
        if named is None:
            return None
        spec.append(named)
    return tuple(spec)


def _iota(dims: list[int], permutation: str | None) -> np.ndarray:
    ids = np.arange(math.prod(dims)).reshape(dims)
    return ids.transpose(_ints(permutation)).reshape(-1) if permutation else ids.reshape(-1)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def spec_of_shapes(
    whole: tuple[int, ...], here: tuple[int, ...], mesh: Mapping[str, int]
) -> Spec | None:
    """Returns the mesh axes that shard each dim, from its local size, or None if ambiguous.

    Args:
        whole: Global shape of the array.
        here: Shape on one device.
        mesh: Sizes of the mesh axes.
    """
    if len(whole) != len(here):
        return None
    free = [name for name, size in mesh.items() if size > 1]
    spec = []
    for size, part in zip(whole, here, strict=True):
        ways = [
            names
            for count in range(len(free) + 1)
            for names in itertools.combinations(free, count)
            if part * math.prod(mesh[name] for name in names) == size
        ]
        if len(ways) != 1:
            return None
        spec.append(ways[0])
        free = [name for name in free if name not in ways[0]]
    return tuple(spec)


def dims(shape: str) -> tuple[int, ...]:
    """Returns the dims of one array's shape, such as `f32[4,8]`."""
    inside = shape[shape.index("[") + 1 : shape.index("]")]
    return tuple(int(dim.removeprefix("<=")) for dim in inside.split(",") if dim)
