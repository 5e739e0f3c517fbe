"""Metrics of part of a batch, and how to combine the parts.

A batch is computed in parts: microbatches, device groups, pipeline stages or evaluation batches.
Each class here defines how its values combine, so a metric of the whole batch does not depend on
how the batch was split.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from shardlib.sharding.across_devices import extreme


class Mean(NamedTuple):
    """An undivided mean. Adding the totals and weights of all microbatches gives the batch mean."""

    total: jax.Array
    """Weighted sum, scalar float32."""
    weight: jax.Array
    """Sum of the weights, scalar float32."""

    @property
    def value(self) -> jax.Array:
        """`total / weight`, or 0 if the weight is 0, so that a batch of padding has no gradient."""
        empty = self.weight == 0
        return jnp.where(empty, 0.0, self.total / jnp.where(empty, 1.0, self.weight))


class Sum(NamedTuple):
    """A sum over the batch, such as a count or a histogram. Parts are added."""

    value: jax.Array
    """An array of any shape, the same for each part; float32 or integer."""


class Max(NamedTuple):
    """A maximum over the batch, elementwise. NaN in any part gives NaN."""

    value: jax.Array
    """An array of any shape, the same for each part; float32 or integer."""


class Min(NamedTuple):
    """A minimum over the batch, elementwise. NaN in any part gives NaN."""

    value: jax.Array
    """An array of any shape, the same for each part; float32 or integer."""


class Output(NamedTuple):
    """Rows returned by a loss, such as logits. Parts are concatenated in batch order.

    The full array is sharded like the batch on its first dim and not sharded on its other dims.
    """

    value: jax.Array
    """[rows of the part, ...], any dtype."""


Aggregate: TypeAlias = Mean | Sum | Max | Min | Output


def join(whole: PyTree, part: PyTree) -> PyTree:
    """Returns two pytrees of arrays and aggregates combined. Arrays are added."""

    def combine(a: Any, b: Any) -> Any:
        if isinstance(a, Max):
            return Max(jnp.maximum(a.value, b.value))
        if isinstance(a, Min):
            return Min(jnp.minimum(a.value, b.value))
        return a + b

    return jax.tree.map(combine, whole, part, is_leaf=_is_extreme)


def nothing(like: PyTree) -> PyTree:
    """Returns the identity of `join` for a pytree of arrays or `ShapeDtypeStruct`s, and of
    aggregates of them: zeros for sums, dtype limits for `Max` and `Min`."""

    def empty(x: Any) -> Any:
        if not _is_extreme(x):
            return jnp.zeros(x.shape, x.dtype)
        dtype = x.value.dtype
        if jnp.issubdtype(dtype, jnp.floating):
            bounds = -jnp.inf, jnp.inf
        else:
            bounds = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
        return type(x)(jnp.full(x.value.shape, bounds[isinstance(x, Min)], dtype))

    return jax.tree.map(empty, like, is_leaf=_is_extreme)


def over_axes(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """Returns the values of all devices along manual mesh axes, joined."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_extreme)
    sums = iter(jax.lax.psum([x for x in leaves if not _is_extreme(x)], axes))

    def joined(x: Any) -> Any:
        if isinstance(x, Max):
            return Max(extreme(x.value, "max", axes))
        if isinstance(x, Min):
            return Min(extreme(x.value, "min", axes))
        return next(sums)

    return treedef.unflatten([joined(x) for x in leaves])


def split_outputs(tree: PyTree) -> tuple[Any, Any]:
    """Returns a tree with None in place of each `Output`, and a tree with only the `Output`s."""
    rest = jax.tree.map(lambda x: None if is_output(x) else x, tree, is_leaf=is_output)
    rows = jax.tree.map(lambda x: x if is_output(x) else None, tree, is_leaf=is_output)
    return rest, rows


def with_outputs(rest: PyTree, rows: PyTree) -> PyTree:
    """Returns the tree that `split_outputs` split."""
    return jax.tree.map(
        lambda row, x: x if row is None else row,
        rows,
        rest,
        is_leaf=lambda x: x is None or is_output(x),
    )


def map_outputs(fn: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Applies a function to the array of each `Output`."""
    return jax.tree.map(
        lambda x: Output(fn(x.value)) if is_output(x) else x, tree, is_leaf=is_output
    )


def is_output(node: object) -> bool:
    """Whether a node of a pytree is an `Output`."""
    return isinstance(node, Output)


def _is_extreme(node: object) -> bool:
    return isinstance(node, Max | Min)
