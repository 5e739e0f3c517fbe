"""The metrics of a step as one dict, with sharded outputs and replicated values."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.losses.aggregate import Aggregate, is_output
from shardlib.sharding.constrain import Scope


class Reported(dict[str, Any]):
    """A dict whose pytree has two parts, so that a compiled step can give each part a sharding.

    Args:
        whole: Replicated values by name. JAX also makes trees of this class with one leaf in place
            of each dict, such as a sharding for all its values; then the dict is empty.
        outputs: Values sharded over their first dim, by name.
    """

    def __init__(self, whole: Any, outputs: Any):
        is_dict = isinstance(whole, Mapping) and isinstance(outputs, Mapping)
        super().__init__({**whole, **outputs} if is_dict else {})
        self._outputs = frozenset(outputs) if is_dict else frozenset()
        self._leaves = None if is_dict else (whole, outputs)

    @classmethod
    def of(cls, found: Mapping[str, Aggregate], *, divided: bool) -> "Reported":
        """Returns the aggregates unchanged, or their values if `divided` is true."""
        apart: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for name, value in found.items():
            apart[is_output(value)][name] = value.value if divided else value
        return cls(*apart)

    def parts(self) -> tuple[Any, Any]:
        """Returns the replicated part and the sharded part."""
        if self._leaves is not None:
            return self._leaves
        apart: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for name, value in self.items():
            apart[name in self._outputs][name] = value
        return apart


jax.tree_util.register_pytree_node(
    Reported, lambda reported: (reported.parts(), None), lambda _, parts: Reported(*parts)
)


def reported_shardings(batch_placed: Any, scope: Scope) -> Any:
    """Returns the shardings of a `Reported`. Outputs are sharded like the rows of the batch."""
    specs = [sharding.spec for sharding in jax.tree.leaves(batch_placed)]
    rows = next((PartitionSpec(spec[0]) for spec in specs if len(spec)), PartitionSpec())
    return Reported(NamedSharding(scope.mesh, PartitionSpec()), NamedSharding(scope.mesh, rows))
