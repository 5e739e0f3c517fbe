"""Sums over groups of what each of them holds for itself, wherever on its devices it lies."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardlib.aggregate import over_axis
from shardlib.constrain import active
from shardlib.manual import manual
from shardlib.mesh import entry_axes
from shardlib.partition import Placement
from shardlib.paths import path_string
from shardlib.train.reduce_hops import Hops, sum_leaves


def sum_groups(tree: Any, scalars: Any, places: Mapping[str, Placement], hops: Hops) -> Any:
    """Returns the sums over groups of trees of arrays [groups, ...] that are split along `hops`.

    It runs in no region of its own, inside of `sl.use`.

    Args:
        tree: Float32 arrays [groups, ...]. A leaf that is placed over the axis of `hops` along one
            of its dims stays split there: each device gets the sum of its own part.
        scalars: What each group reports, [groups, ...], which `aggregate.join` joins.
        places: Where each leaf of `tree` lies, by path, its first dim apart.
        hops: The axis, and the way along it.

    Returns:
        Both trees, without the dim of the groups.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    specs = [places[path_string(path)].spec for path, _ in paths]
    dims = [kept_dim(spec, hops.axis) for spec in specs]

    def add(leaves: list[jax.Array], scalars: Any) -> Any:
        total = over_axis(jax.tree.map(lambda x: x[0], scalars), hops.axis)
        return sum_leaves([x[0] for x in leaves], dims, hops), total

    # Every axis by hand: each device sends the shard that it holds, with nothing gathered before.
    scope = active()
    axes = tuple(scope.sizes) if scope else ()
    placed = [PartitionSpec(hops.axis, *_moved(spec, hops.axis, keep=False)) for spec in specs]
    results = [PartitionSpec(*_moved(spec, hops.axis, keep=True)) for spec in specs]
    sums, scalars = manual(
        add, axes, (placed, PartitionSpec(hops.axis)), (results, PartitionSpec())
    )([leaf for _, leaf in paths], scalars)
    return treedef.unflatten(sums), scalars


def kept_dim(spec: PartitionSpec, axis: str) -> int | None:
    """Returns the dim that a placement splits over a mesh axis, or None."""
    return next((dim for dim, names in enumerate(spec) if axis in entry_axes(names)), None)


def _moved(spec: PartitionSpec, axis: str, *, keep: bool) -> list[tuple[str, ...] | None]:
    """A placement without a mesh axis, or with it as the one that splits finest.

    The parts along the axis are cut out of what each device holds; another order is left to the
    compiler, which then moves one part for each device.
    """
    entries = []
    for names in map(entry_axes, spec):
        others = tuple(name for name in names if name != axis)
        last = (axis,) if keep and axis in names else ()
        entries.append((*others, *last) or None)
    return entries
