"""Functions of logits, computed by each device for rows of its own."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardlib.nn.attention.paged import group_axes
from shardlib.sharding.constrain import active
from shardlib.sharding.manual import manual


def by_rows(function: Callable[..., Any], logits: jax.Array, *arrays: Any) -> Any:
    """Returns what a function of arrays [rows, ...] does of arrays [groups, rows, ...].

    Devices that share the vocabulary exchange it for rows: all devices of a group have rows, which
    sends each logit once. XLA would gather the logits to rank them.
    """
    scope, (groups, count, _) = active(), logits.shape
    axes, parts = (), 1
    if scope is not None:
        first = group_axes(groups)
        others = tuple(name for name, n in scope.sizes.items() if n > 1 and name not in first)
        axes, parts = first + others, math.prod(scope.sizes[name] for name in others)

    def flat(x: jax.Array) -> jax.Array:
        # As many rows of a group as its devices can share.
        x = jnp.pad(x, ((0, 0), (0, -count % parts), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(-1, *x.shape[2:])

    of_rows = manual(function, axes, P(axes), P(axes)) if axes else function
    found = of_rows(*jax.tree.map(flat, (logits, *arrays)))
    return jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:])[:, :count], found)
