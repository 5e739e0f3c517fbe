"""The metrics of a step as one dict, of which outputs are sharded and all else is replicated."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.aggregate import Aggregate, is_output
from shardlib.constrain import Scope


class Reported(dict[str, Any]):
    """A dict whose pytree has two parts, so that a compiled step can say where each part lies.

    Args:
        whole: What is replicated, by name. JAX also makes trees of this class with a leaf in place
            of each dict, such as one sharding for all of them; then the dict is empty.
        outputs: What is sharded over its first dim, by name.
    """

    def __init__(self, whole: Any, outputs: Any):
        is_dict = isinstance(whole, Mapping) and isinstance(outputs, Mapping)
        super().__init__({**whole, **outputs} if is_dict else {})
        self._outputs = frozenset(outputs) if is_dict else frozenset()
        self._leaves = None if is_dict else (whole, outputs)

    @classmethod
    def of(cls, found: Mapping[str, Aggregate], *, divided: bool) -> "Reported":
        """Returns aggregates as they are, or, where `divided`, their values."""
        apart: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for name, value in found.items():
            apart[is_output(value)][name] = value.value if divided else value
        return cls(*apart)

    def parts(self) -> tuple[Any, Any]:
        """Returns what is replicated, and what is sharded."""
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
    """Returns the shardings of a `Reported`, from those of the batch: outputs lie as its rows."""
    specs = [sharding.spec for sharding in jax.tree.leaves(batch_placed)]
    rows = next((PartitionSpec(spec[0]) for spec in specs if len(spec)), PartitionSpec())
    return Reported(NamedSharding(scope.mesh, PartitionSpec()), NamedSharding(scope.mesh, rows))
