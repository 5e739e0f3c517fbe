"""What a loss reports of a part of a batch, and how the parts become the whole batch.

A batch is computed in parts: microbatches, groups of devices, stages of a pipeline, batches of an
evaluation. Each class here says how its values combine, so that a metric of the whole batch does
not depend on how the batch was cut.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from shardlib.extremes import extreme


class Mean(NamedTuple):
    """A mean that is not divided yet: sums of microbatches add up to the mean of the batch."""

    total: jax.Array
    """Weighted sum, scalar float32."""
    weight: jax.Array
    """Sum of the weights, scalar float32."""

    @property
    def value(self) -> jax.Array:
        """`total / weight`; 0 where the weight is 0, so that a batch of padding has no gradient."""
        empty = self.weight == 0
        return jnp.where(empty, 0.0, self.total / jnp.where(empty, 1.0, self.weight))


class Sum(NamedTuple):
    """A sum over the batch, such as a count or a histogram: parts are added."""

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
    """Rows that a loss returns, such as logits: parts are put together in the order of the batch.

    The whole array is sharded over the batch as the batch is, and whole along its other dims.
    """

    value: jax.Array
    """[rows of the part, ...], any dtype."""


Aggregate: TypeAlias = Mean | Sum | Max | Min | Output


def join(whole: Any, part: Any) -> Any:
    """Returns pytrees of arrays and aggregates combined: arrays are added."""

    def combine(a: Any, b: Any) -> Any:
        if isinstance(a, Max):
            return Max(jnp.maximum(a.value, b.value))
        if isinstance(a, Min):
            return Min(jnp.minimum(a.value, b.value))
        return a + b

    return jax.tree.map(combine, whole, part, is_leaf=_is_extreme)


def nothing(like: Any) -> Any:
    """Returns what changes nothing when it is joined: zeros, and the ends of the range of a dtype.

    Args:
        like: A pytree of arrays or `ShapeDtypeStruct`s, and of aggregates of them.
    """

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


def over_axis(tree: Any, axis: str) -> Any:
    """Returns what all devices along a manual mesh axis hold, joined."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_extreme)
    sums = iter(jax.lax.psum([x for x in leaves if not _is_extreme(x)], axis))

    def joined(x: Any) -> Any:
        if isinstance(x, Max):
            return Max(extreme(x.value, "max", (axis,)))
        if isinstance(x, Min):
            return Min(extreme(x.value, "min", (axis,)))
        return next(sums)

    return treedef.unflatten([joined(x) for x in leaves])


def split_outputs(tree: Any) -> tuple[Any, Any]:
    """Returns a tree with None for each `Output`, and one with None for everything else."""
    rest = jax.tree.map(lambda x: None if is_output(x) else x, tree, is_leaf=is_output)
    rows = jax.tree.map(lambda x: x if is_output(x) else None, tree, is_leaf=is_output)
    return rest, rows


def with_outputs(rest: Any, rows: Any) -> Any:
    """Returns what `split_outputs` took apart."""
    return jax.tree.map(
        lambda row, x: x if row is None else row,
        rows,
        rest,
        is_leaf=lambda x: x is None or is_output(x),
    )


def map_outputs(fn: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """Applies a function to the array of each `Output`."""
    return jax.tree.map(
        lambda x: Output(fn(x.value)) if is_output(x) else x, tree, is_leaf=is_output
    )


def is_output(node: Any) -> bool:
    """Whether a node of a pytree is an `Output`."""
    return isinstance(node, Output)


def _is_extreme(node: Any) -> bool:
    return isinstance(node, Max | Min)
