"""Replica groups of collectives, matched to mesh axes."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from shardlib.cost.layout import divisors
from shardlib.explain.hlo.text import Instruction

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
"""Opcodes of collectives."""
Groups = frozenset[frozenset[int]]
Rows = list[list[int]]
"""Groups and their members, both in the order of the text."""


def groups_of_axes(sizes: Mapping[str, int]) -> dict[Groups, tuple[str, ...]]:
    """Returns the mesh axes of each possible set of device groups.

    Groups may run along any subset of the axes larger than 1, or along a part of one axis, such as
    8 devices of an axis that share 2 heads.
    """
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = list(sizes)
    axes_by_groups: dict[Groups, tuple[str, ...]] = {}
    for name, size in sizes.items():
        for before, width in itertools.product(divisors(size), repeat=2):
            if width > 1 and size % (before * width) == 0:
                dim = names.index(name)
                shape = (*ids.shape[:dim], before, width, -1, *ids.shape[dim + 1 :])
                axes_by_groups[as_groups(_along(ids.reshape(shape), [dim + 1]))] = (name,)
    wide = [name for name in names if sizes[name] > 1]
    subsets = (s for n in range(len(wide) + 1) for s in itertools.combinations(wide, n))
    return axes_by_groups | {
        as_groups(_along(ids, [names.index(name) for name in subset])): subset for subset in subsets
    }


def _along(ids: np.ndarray, dims: list[int]) -> Rows:
    """Returns the groups of ids that differ only in `dims`, whose last dim varies fastest."""
    rest = [dim for dim in range(ids.ndim) if dim not in dims]
    rows = ids.transpose([*rest, *dims]).reshape(-1, math.prod(ids.shape[dim] for dim in dims))
    return rows.tolist()


def as_groups(rows: Iterable[Iterable[int]]) -> Groups:
    return frozenset(frozenset(row) for row in rows)


def read_groups(instruction: Instruction, kind: str, num_devices: int) -> Groups | None:
    """Returns the groups of partitions of a collective, or None for an unknown format."""
    rows = read_rows(instruction, kind, num_devices)
    return None if rows is None else as_groups(rows)


def read_rows(instruction: Instruction, kind: str, num_devices: int) -> Rows | None:
    """Returns the groups of partitions of a collective in order, or None for an unknown format.

    A gather concatenates its parts in the order of the members.
    """
    text = instruction.attributes.get("replica_groups", "{}")
    everyone = [list(range(num_devices))]
    # Without global ids, the ids are replicas. SPMD has one replica, so each group holds all
    # partitions. Exchanges name partitions in any case.
    per_replica = kind in ("all-reduce", "all-gather", "reduce-scatter")
    if per_replica and "use_global_device_ids" not in instruction.attributes:
        if text in ("{}", "{{0}}"):
            in_one_replica = "channel_id" in instruction.attributes
            return everyone if in_one_replica else [[i] for i in range(num_devices)]
    elif text == "{}":
        return everyone
    if text.startswith("{{"):
        rows = re.findall(r"\{([\d,\s]*)\}", text[1:-1])
        return [[int(i) for i in row.split(",")] for row in rows if row.strip()]
    if text.startswith("["):
        return _iota_groups(text)
    return _mesh_groups(text)


def _iota_groups(text: str) -> Rows | None:
    """Parses `[groups,members]<=[dims]T(permutation)`: an iota, reshaped, transposed, reshaped."""
    form = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if form is None:
        return None
    rows, dims = _ints(form[1]), _ints(form[2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if form[3]:
        ids = ids.transpose(_ints(form[3]))
    return ids.reshape(rows[0], -1).tolist() if ids.size % rows[0] == 0 else None


def _mesh_groups(text: str) -> Rows | None:
    """Parses `mesh['a'=2,'b'=8], device_ids=(...) {'a','b':(2)4}`.

    `'b':(2)4` is the sub-axis of size 4 of axis b after a major part of size 2. The ids are a list,
    a transposed iota `[dims]T(permutation)`, or an iota if omitted.
    """
    form = re.fullmatch(r"@?mesh[\[<](.*?)[\]>](?:,? device_ids=\((.*)\))? \{(.*)\}", text)
    if form is None:
        return None
    axes = re.findall(r"['\"]?([^'\",=]+)['\"]?=(\d+)", form[1])
    sizes = {name: int(size) for name, size in axes}
    ids = _device_ids(form[2], math.prod(sizes.values()))
    if ids is None:
        return None
    shape: list[int] = []
    grouped: dict[str, int] = {}
    named = re.findall(r"['\"]?([^'\",:]+)['\"]?(?::\((\d+)\)(\d+))?(?:,|$)", form[3])
    parts = {
        name: (int(before or 1), int(size or sizes.get(name, 1))) for name, before, size in named
    }
    if len(parts) < len(named):  # Two parts of one axis.
        return None
    if not set(parts) <= set(sizes):
        return None
    for name, size in sizes.items():
        before, width = parts.get(name, (size, 1))
        if name in parts:
            grouped[name] = len(shape) + 1
        shape += [before, width, size // (before * width)]
    if math.prod(shape) != ids.size:
        return None
    return _along(ids.reshape(shape), [grouped[name] for name in parts])


def _device_ids(text: str | None, count: int) -> np.ndarray | None:
    """Parses the order of devices in the mesh format."""
    if not text:
        return np.arange(count)
    form = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if form is None:
        ids = np.array(_ints(text))
    else:
        dims = _ints(form[1])
        ids = np.arange(math.prod(dims)).reshape(dims)
        ids = ids.transpose(_ints(form[2])) if form[2] else ids
    return ids.reshape(-1) if ids.size == count else None


def tile_devices(text: str) -> np.ndarray | None:
    """Returns the devices of each tile of an array by its sharding, such as
    `{devices=[4,1,2]<=[8] last_tile_dim_replicate}`, or None if the text names no tiles."""
    form = re.search(r"devices=\[([\d,]+)\](?:<=(\[[\d,]+\](?:T\([\d,]+\))?)|([\d,]+))", text)
    if form is None:
        return None
    tiles = _ints(form[1])
    ids = _device_ids(form[2] or form[3], math.prod(tiles))
    return None if ids is None else ids.reshape(tiles)


def permuted_pairs(instruction: Instruction) -> list[tuple[int, int]]:
    """Returns the pairs of sending and receiving devices of a permutation."""
    text = instruction.attributes.get("source_target_pairs", "")
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", text)]


def permuted_axes(instruction: Instruction, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which senders and receivers differ."""
    pairs = permuted_pairs(instruction)
    if not pairs:
        return None
    shape = tuple(sizes.values())
    ends = np.array(pairs)
    if ends.max() >= math.prod(shape):
        return None
    coordinates = np.stack(np.unravel_index(ends, shape))
    moved = (coordinates[..., 0] != coordinates[..., 1]).any(axis=1)
    return tuple(name for name, moves in zip(sizes, moved, strict=True) if moves)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
