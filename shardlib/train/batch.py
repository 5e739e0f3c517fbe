"""Where the leaves of a batch lie."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardlib.constrain import Scope
from shardlib.errors import RuleError, did_you_mean
from shardlib.paths import named_leaves, path_string

BatchAxes = Mapping[str, tuple[str | None, ...]]


def batch_shardings(batch: Any, scope: Scope, batch_axes: BatchAxes) -> Any:
    """Returns the sharding of every leaf of a batch.

    Raises:
        RuleError: If the rules cannot place a leaf, for example because the mesh does not divide
            the batch, or `batch_axes` names a leaf that is not there.
    """
    paths = named_leaves(batch)
    unknown = [name for name in batch_axes if name not in paths]
    if unknown:
        raise RuleError(
            f"batch_axes names {', '.join(map(repr, unknown))}, but the batch holds "
            f"{', '.join(paths)}.{did_you_mean(unknown[0], paths)}\n  Name leaves of the batch."
        )

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        rank = len(leaf.shape)
        axes = batch_axes.get(path_string(path), ("batch", *[None] * (rank - 1))[:rank])
        return scope.sharding(axes, tuple(leaf.shape), "activations")

    return jax.tree_util.tree_map_with_path(sharding, batch)
