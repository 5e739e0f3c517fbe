"""Load balancing without a loss: biases that grow for idle experts and shrink for busy ones.

The bias of an expert affects the choice of experts but not the weights of their results. Its
"gradient" is the load of the expert above the mean (`RouterStats.violation`), whose sign gives the
direction of the step.

Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
algorithm 1.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from shardlib.paths import path_string

BIAS = "router_bias"
"""Last path segment of every router bias."""


def balance_biases(
    optimizer: optax.GradientTransformation, rate: float = 1e-3
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` for all parameters except the router biases, which take signed steps.

    The step of a bias is `-rate * sign(gradient)`. `optimizer` does not see the biases: its
    clipping, weight decay and moments cover the other parameters alone. For a model without routers
    the result is the same as `optimizer`, with the same state.

    Args:
        optimizer: Any optimizer.
        rate: The step of a bias; 0.001 in the source, for scores in [0, 1].
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: PyTree) -> PyTree:
        return inner.init(_without_biases(params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[Any, Any]:
        others = None if params is None else _without_biases(params)
        changed, state = inner.update(_without_biases(updates), state, others, **extra)

        def choose(path: KeyPath, gradient: jax.Array, other: PyTree) -> PyTree:
            return -rate * jnp.sign(gradient) if _is_bias(path) else other

        return jax.tree_util.tree_map_with_path(choose, updates, changed), state

    return optax.GradientTransformationExtraArgs(init, update)


def _is_bias(path: KeyPath) -> bool:
    return path_string(path).split("/")[-1] == BIAS


def _without_biases(tree: PyTree) -> PyTree:
    """Returns the tree with a `MaskedNode`, which has no leaves, in place of each bias."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: optax.MaskedNode() if _is_bias(path) else leaf, tree
    )
