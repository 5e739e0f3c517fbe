"""Weights and MLPs of gated experts."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from shardlib.nn.remat import tag

Activation = Callable[[jax.Array], jax.Array]

TAGS = ("moe_rows", "moe_hidden", "moe_results")
"""Names for the `save:` policies of `shardlib.nn.remat`: rows as they reach their experts, their
hidden units, and results as they come back. With the first and the last, nothing is sent twice."""


class ExpertWeights(NamedTuple):
    """Gated MLPs, `down(activation(gate(x)) * up(x))`, one for each expert."""

    gate: Float[Array, "expert embed mlp"]
    up: Float[Array, "expert embed mlp"]
    down: Float[Array, "expert mlp embed"]


def mlp_of_sorted(
    rows: Float[Array, "n embed"],
    sizes: Int[Array, " expert"],
    weights: ExpertWeights,
    activation: Activation,
) -> Float[Array, "n embed"]:
    """Returns the experts' outputs for rows sorted by expert.

    Args:
        rows: Rows after the last expert's rows are undefined, and so are their results.
        sizes: int32, the number of rows of each expert.
        weights: The experts.
        activation: Nonlinearity of the gate.
    """
    rows = tag(rows, "moe_rows")
    gate = jax.lax.ragged_dot(rows, weights.gate, sizes)
    up = jax.lax.ragged_dot(rows, weights.up, sizes)
    # Rows without an expert may hold anything, and NaN would spread in gradients.
    meant = jnp.arange(rows.shape[0], dtype=jnp.int32) < jnp.sum(sizes)
    hidden = jnp.where(meant[:, None], activation(gate) * up, jnp.zeros((), rows.dtype))
    return jax.lax.ragged_dot(tag(hidden, "moe_hidden"), weights.down, sizes)


def mlp_of_slots(
    slots: Float[Array, "expert n embed"], weights: ExpertWeights, activation: Activation
) -> Float[Array, "expert n embed"]:
    """Returns the experts' outputs for n slots of each expert."""
    slots = tag(slots, "moe_rows")
    gate = jnp.einsum("end,edm->enm", slots, weights.gate)
    up = jnp.einsum("end,edm->enm", slots, weights.up)
    hidden = tag(activation(gate) * up, "moe_hidden")
    return jnp.einsum("enm,emd->end", hidden, weights.down)
