"""The protocol of a functional view, and its trees."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from shardlib.paths import key_string

Tree = dict[str, Any]
AxesByPath = Mapping[str, tuple[str | None, ...] | None]
Inputs = tuple[Any, ...] | Mapping[str, Any]
Keys = tuple[str, ...]


class FunctionalModule(Protocol):
    """A module apart from its arrays. Leaf paths are unique across `params` and `model_state`."""

    axes: AxesByPath
    """The logical axes of each leaf of both trees; `None` for a leaf without names."""
    kinds: Mapping[str, str]
    """The kind of variable of each leaf: its NNX type, or its linen collection."""
    frozen: frozenset[str]
    """The leaves of `model_state` that are untrained parameters. A call leaves them unchanged."""
    float32: frozenset[str]
    """The parameters that must not be rounded: NNX variables with the metadata `float32=True`."""
    reduces_over: frozenset[str]
    """The axes of a `vmap` or `pmap` over which layers reduce: their `axis_name`."""
    name: str
    """The class of the module."""

    def shapes(self) -> tuple[Tree, Tree]:
        """Returns `(params, model_state)` as `ShapeDtypeStruct`s."""
        ...

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Returns initial `(params, model_state)`; meant to be traced."""
        ...

    def merge(self, params: Tree, model_state: Tree, key: jax.Array) -> Any:
        """Returns the module over these arrays, its random streams derived from `key`."""
        ...

    def collect(self, module: Any) -> Tree:
        """Returns the `model_state` of a merged module, after calls."""
        ...


@dataclasses.dataclass(frozen=True)
class VariableTree:
    """The structure of a tree of variables, and the path of each of its leaves."""

    treedef: Any
    paths: tuple[Keys, ...]

    def to_tree(self, variables: PyTree) -> Tree:
        """Returns the leaves as nested dicts by path."""
        return nested(dict(zip(self.paths, jax.tree.leaves(variables), strict=True)))

    def to_variables(self, tree: Tree) -> Any:
        """Reverses `to_tree`."""
        return jax.tree.unflatten(self.treedef, [_lookup(tree, path) for path in self.paths])


def nested(flat: Mapping[Keys, Any]) -> Tree:
    """Returns nested dicts from leaves by path."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, name = path
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def keys_of(key_path: KeyPath) -> Keys:
    """Returns a JAX key path as plain strings."""
    return tuple(key_string(key) for key in key_path)


def _lookup(tree: Mapping[str, Any], path: Keys) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def axis_names_of(
    metadata: Sequence[Any] | PartitionSpec | NamedSharding | None, rank: int
) -> tuple[str | None, ...] | None:
    """Returns the logical axes in the metadata of a variable, one for each dim.

    A `PartitionSpec`, alone or in a `NamedSharding`, may be shorter than the rank, as everywhere in
    JAX. Several names of one dim are joined as in rules: `("data", "fsdp")` is `"data+fsdp"`.
    """
    if metadata is None:
        return None
    spec = metadata.spec if isinstance(metadata, NamedSharding) else metadata
    names = [_joined(entry) for entry in spec]
    if isinstance(spec, PartitionSpec):
        names += [None] * (rank - len(names))
    return tuple(names)


def _joined(entry: object) -> Any:
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        return "+".join(map(str, entry)) or None
    return entry
