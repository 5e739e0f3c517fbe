"""Weights and MLPs of gated experts."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardlib.nn.remat import tag

Glu = Callable[[jax.Array, jax.Array], jax.Array]
"""`glu(gate, up)`: the hidden units from the results of the two projections."""

TAGS = ("moe_rows", "moe_hidden", "moe_results")
"""Names for the `save:` policies of `shardlib.nn.remat`: rows as they reach their experts, their
hidden units, and results as they come back. With the first and the last, nothing is sent twice."""


class ExpertWeights(NamedTuple):
    """Gated MLPs, `down(glu(gate(x), up(x)))`, one for each expert; with biases all three have one.

    Source: Shazeer 2020, "GLU Variants Improve Transformer".
    """

    gate: Float[Array, "expert embed mlp"]
    up: Float[Array, "expert embed mlp"]
    down: Float[Array, "expert mlp embed"]
    gate_bias: Float[Array, "expert mlp"] | None = None
    up_bias: Float[Array, "expert mlp"] | None = None
    down_bias: Float[Array, "expert embed"] | None = None


@functools.cache  # Modules that hold the result are equal if their activations are.
def gated(activation: Callable[[jax.Array], jax.Array]) -> Glu:
    """Returns the units `activation(gate) * up`."""
    return lambda gate, up: activation(gate) * up


def mlp_of_sorted(
    rows: Float[Array, "n embed"],
    sizes: Int[Array, " expert"],
    weights: ExpertWeights,
    glu: Glu,
) -> Float[Array, "n embed"]:
    """Returns the experts' outputs for rows sorted by expert. `sizes` are the rows of each expert,
    int32. Rows after the last expert's are undefined, and so are their results."""

    def project(rows: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = jax.lax.ragged_dot(rows, kernel, sizes)
        return y if bias is None else y + _of_rows(bias, sizes, rows.shape[0])

    rows = tag(rows, "moe_rows")
    gate = project(rows, weights.gate, weights.gate_bias)
    up = project(rows, weights.up, weights.up_bias)
    # Rows without an expert may hold anything, and NaN would spread in gradients.
    meant = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(sizes)
    hidden = jnp.where(meant[:, None], glu(gate, up), jnp.zeros((), rows.dtype))
    return project(tag(hidden, "moe_hidden"), weights.down, weights.down_bias)


def _of_rows(bias: jax.Array, sizes: jax.Array, num: int) -> jax.Array:
    """Returns the bias [expert, dim] of the expert of each of `num` sorted rows.

    By a product, since the gradient of a gather would add rows that collide.
    """
    row, ends = jnp.arange(num, dtype=jnp.int32)[:, None], jnp.cumsum(sizes, dtype=jnp.int32)[None]
    is_of = (row >= ends - sizes[None]) & (row < ends)
    return jnp.matmul(is_of.astype(bias.dtype), bias, precision=jax.lax.Precision.HIGHEST)


def mlp_of_slots(
    slots: Float[Array, "expert n embed"], weights: ExpertWeights, glu: Glu
) -> Float[Array, "expert n embed"]:
    """Returns the experts' outputs for n slots of each expert."""

    def project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = jnp.einsum("end,edm->enm", x, kernel)
        return y if bias is None else y + bias[:, None]

    slots = tag(slots, "moe_rows")
    gate = project(slots, weights.gate, weights.gate_bias)
    up = project(slots, weights.up, weights.up_bias)
    hidden = tag(glu(gate, up), "moe_hidden")
    return project(hidden, weights.down, weights.down_bias)
