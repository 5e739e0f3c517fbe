"""Splitting a batch into microbatches, and summing over them with one compiled body."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from shardlib.errors import ModelError
from shardlib.losses.aggregate import join, map_outputs, nothing, split_outputs, with_outputs
from shardlib.paths import named_leaves

C = TypeVar("C")
T = TypeVar("T")


def split(batch: PyTree, n: int) -> PyTree:
    """Returns a batch of leaves [b, ...] as `n` microbatches, leaves [n, b // n, ...].

    Microbatch `i` holds the examples `i, i + n, i + 2n, ...`. The batch is sharded on its first
    dim, so with a strided split every device splits its own examples. Contiguous microbatches would
    each lie on a few devices and have to be gathered first.

    Raises:
        ModelError: If a leaf has no first dim or `n` does not divide it; names every such leaf.
    """
    _check(batch, n)

    def strided(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)

    return jax.tree.map(strided, batch)


def unsplit(parts: jax.Array) -> jax.Array:
    """Returns the rows [b, ...] of microbatches [n, b // n, ...], in the order before `split`."""
    return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[0] * parts.shape[1], *parts.shape[2:])


def accumulate(
    fn: Callable[[C, Any, Any], tuple[C, T]], batch: PyTree, n: int, carry: C
) -> tuple[C, T]:
    """Returns the final carry and the sums of `fn` over `n` microbatches.

    The body is compiled once, and the activations of one microbatch are live at a time. If `n` is
    1, the function is called on the whole batch without a loop.

    Args:
        fn: `fn(carry, microbatch, index) -> (carry, sums)`. The sums are a pytree of sums (not
            means) over one microbatch and of aggregates from `shardlib.losses.aggregate`. `index`
            is a scalar int32 from which each microbatch derives its randomness.
        batch: Pytree of arrays [b, ...].
        n: Number of microbatches; divides b.
        carry: Carry of the first microbatch, such as batch statistics. Each microbatch passes its
            carry on to the next.

    Returns:
        The last carry and the summed pytree. Floating-point leaves are summed and returned in
        float32 (also for `n == 1`), other leaves in their own dtype. Each `Output` holds the rows
        of all microbatches, in their dtype and in batch order.

    Raises:
        ModelError: If `n` does not divide the batch.
    """
    if n == 1:
        _check(batch, n)
        carry, sums = fn(carry, batch, jnp.int32(0))
        rest, rows = split_outputs(sums)
        return carry, with_outputs(jax.tree.map(widened, rest), rows)
    parts = split(batch, n)

    def part_sums(carry: C, part: PyTree, index: Any) -> tuple[C, Any, Any]:
        carry, new = fn(carry, part, index)
        rest, rows = split_outputs(new)
        return carry, jax.tree.map(widened, rest), rows

    def body(carry_and_sums: tuple[C, Any], part_and_index: Any) -> tuple[tuple[C, Any], Any]:
        carry, sums = carry_and_sums
        carry, new, rows = part_sums(carry, *part_and_index)
        return (carry, join(sums, new)), rows

    _, first, _ = jax.eval_shape(part_sums, carry, _first(parts), jnp.int32(0))
    indexed = (parts, jnp.arange(n, dtype=jnp.int32))
    (carry, sums), rows = jax.lax.scan(body, (carry, nothing(first)), indexed)
    return carry, with_outputs(sums, map_outputs(unsplit, rows))


def _first(parts: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)


def widened(x: jax.Array) -> jax.Array:
    """Returns floating-point values in float32, the dtype of sums, and other values unchanged."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _check(batch: PyTree, n: int) -> None:
    if n < 1:
        raise ModelError(f"{n} microbatches were asked for.\n  Use 1 to leave batches whole.")
    faults = [
        f"the batch's {path or 'array'} has shape {tuple(leaf.shape)}, whose first dim "
        f"cannot be divided into {n} microbatches."
        for path, leaf in named_leaves(batch).items()
        if not leaf.shape or leaf.shape[0] % n
    ]
    if faults:
        raise ModelError(
            "\n".join(faults) + f"\n  Choose a batch that is a multiple of {n}, or another number "
            "of microbatches."
        )
