"""Sums over groups of arrays with any placement within a group."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardlib.losses.aggregate import over_axis
from shardlib.mesh import entry_axes
from shardlib.paths import path_string
from shardlib.sharding.constrain import active
from shardlib.sharding.manual import manual
from shardlib.sharding.partition import Placement
from shardlib.train.reduce.hops import Hops, sum_leaves


def sum_groups(tree: Any, scalars: Any, places: Mapping[str, Placement], hops: Hops) -> Any:
    """Returns the sums over groups of arrays [groups, ...] that are sharded over the axis of
    `hops`.

    Call it inside `sl.use` and outside of manual regions.

    Args:
        tree: Float32 arrays [groups, ...]. If the placement of a leaf shards a dim over the axis of
            `hops`, the sum stays sharded, and each device gets its own part.
        scalars: Aggregates of each group, [groups, ...], for `aggregate.join`.
        places: Placement of each leaf of `tree` by path, without the dim of the groups.
        hops: The axis and its hops.

    Returns:
        Both trees, without the dim of the groups.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    specs = [places[path_string(path)].spec for path, _ in paths]
    dims = [kept_dim(spec, hops.axis) for spec in specs]

    def add(leaves: list[jax.Array], scalars: Any) -> Any:
        total = over_axis(jax.tree.map(lambda x: x[0], scalars), hops.axis)
        return sum_leaves([x[0] for x in leaves], dims, hops), total

    # Manual over every axis: each device sends its own shard, and nothing is gathered before.
    scope = active()
    axes = tuple(scope.sizes) if scope else ()
    placed = [PartitionSpec(hops.axis, *_moved(spec, hops.axis, keep=False)) for spec in specs]
    results = [PartitionSpec(*_moved(spec, hops.axis, keep=True)) for spec in specs]
    sums, scalars = manual(
        add, axes, (placed, PartitionSpec(hops.axis)), (results, PartitionSpec())
    )([leaf for _, leaf in paths], scalars)
    return treedef.unflatten(sums), scalars


def kept_dim(spec: PartitionSpec, axis: str) -> int | None:
    """Returns the dim that a PartitionSpec shards over a mesh axis, or None."""
    return next((dim for dim, names in enumerate(spec) if axis in entry_axes(names)), None)


def _moved(spec: PartitionSpec, axis: str, *, keep: bool) -> list[tuple[str, ...] | None]:
    """Returns the entries of a PartitionSpec without a mesh axis, or with it as the minor axis.

    Parts along the axis are cut out of the data on each device. For any other order of axes the
    compiler moves one part per device.
    """
    entries = []
    for names in map(entry_axes, spec):
        others = tuple(name for name in names if name != axis)
        last = (axis,) if keep and axis in names else ()
        entries.append((*others, *last) or None)
    return entries
