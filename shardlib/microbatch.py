"""Splitting a batch into microbatches, and summing over them with one compiled body."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from shardlib.errors import ModelError
from shardlib.paths import named_leaves

C = TypeVar("C")
T = TypeVar("T")


def split(batch: Any, n: int) -> Any:
    """Returns a batch of leaves [b, ...] as `n` microbatches, leaves [n, b // n, ...].

    Microbatch `i` holds the examples `i, i + n, i + 2n, ...`. The split is strided because a batch
    is sharded on its first dim: then every device splits the examples it holds, where contiguous
    microbatches would lie on few devices each and be gathered first.

    Raises:
        ModelError: If a leaf has no first dim or `n` does not divide it; names every such leaf.
    """
    _check(batch, n)

    def strided(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0] // n, n, *x.shape[1:]), 1, 0)

    return jax.tree.map(strided, batch)


def accumulate(
    fn: Callable[[C, Any, Any], tuple[C, T]], batch: Any, n: int, carry: C
) -> tuple[C, T]:
    """Returns the sum over `n` microbatches of what `fn` computes, and what it hands on.

    The body is compiled once, and one microbatch's activations live at a time. With `n == 1` the
    function is called with the whole batch and no loop.

    Args:
        fn: `fn(carry, microbatch, index) -> (carry, sums)`; the sums are a pytree of sums (not
            means) of one microbatch. `index` is a scalar int32, to derive each microbatch's
            randomness from.
        batch: Pytree of arrays [b, ...].
        n: Number of microbatches; divides b.
        carry: What the first microbatch is given; each hands its own on to the next, as batch
            statistics are.

    Returns:
        The last carry, and the summed pytree. Floating-point leaves are summed in float32 and
        returned in it (also for `n == 1`), others in their own dtype.

    Raises:
        ModelError: If `n` does not divide the batch.
    """
    if n == 1:
        _check(batch, n)
        carry, sums = fn(carry, batch, jnp.int32(0))
        return carry, jax.tree.map(widened, sums)
    parts = split(batch, n)

    def body(carry_and_sums: tuple[C, T], part_and_index: Any) -> tuple[tuple[C, T], None]:
        carry, sums = carry_and_sums
        carry, new = fn(carry, *part_and_index)
        return (carry, jax.tree.map(lambda s, x: s + widened(x), sums, new)), None

    _, first = jax.eval_shape(fn, carry, _first(parts), jnp.int32(0))
    zeros = jax.tree.map(lambda x: widened(jnp.zeros(x.shape, x.dtype)), first)
    return jax.lax.scan(body, (carry, zeros), (parts, jnp.arange(n, dtype=jnp.int32)))[0]


def _first(parts: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts)


def widened(x: jax.Array) -> jax.Array:
    """Returns floating-point values in float32, in which they are summed; others as they are."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _check(batch: Any, n: int) -> None:
    if n < 1:
        raise ModelError(f"{n} microbatches were asked for.\n  Use 1 to leave batches whole.")
    faults = [
        f"the batch's {path or 'array'} has shape {tuple(leaf.shape)}, whose first dim "
        f"{n} microbatches do not divide."
        for path, leaf in named_leaves(batch).items()
        if not leaf.shape or leaf.shape[0] % n
    ]
    if faults:
        raise ModelError(
            "\n".join(faults) + f"\n  Choose a batch that is a multiple of {n}, or another number "
            "of microbatches."
        )
