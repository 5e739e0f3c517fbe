"""The exponential moving average of the parameters, kept in the optimizer state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree


class EmaState(NamedTuple):
    """State of `average_params`. The average has the tree and the shardings of the parameters."""

    count: jax.Array
    """Number of updates so far, int32 scalar."""
    params: PyTree
    """The averaged parameters, float32."""


def average_params(decay: float) -> optax.GradientTransformation:
    """Returns a transformation that averages the parameters over updates. Place it last in a chain.

    After update `t = 1, 2, ...` the average is `d * average + (1 - d) * params` with
    `d = min(decay, (1 + t) / (10 + t))`, so a short run forgets the initial values as fast as a
    long one. The average starts at the initial parameters. It is kept in float32 whatever the dtype
    of the parameters, because bfloat16 would round `1 - decay` away.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992;
    TensorFlow's `ExponentialMovingAverage(num_updates=...)` for the bound on the decay.
    """

    def init(params: PyTree) -> EmaState:
        # A copy: the average and the parameters are donated as separate buffers.
        copied = jax.tree.map(lambda p: jnp.array(p, dtype=jnp.float32, copy=True), params)
        return EmaState(count=jnp.zeros((), jnp.int32), params=copied)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, EmaState]:
        if params is None:
            raise ValueError(
                "the average of the parameters needs transform.update(..., params=...)"
            )
        count = state.count + 1
        seen = count.astype(jnp.float32)
        rate = jnp.minimum(decay, (1 + seen) / (10 + seen))

        def averaged(old: jax.Array, param: jax.Array, change: jax.Array) -> jax.Array:
            new = (param + change.astype(param.dtype)).astype(jnp.float32)
            return rate * old + (1 - rate) * new

        return updates, EmaState(count, jax.tree.map(averaged, state.params, params, updates))

    return optax.GradientTransformation(init, update)


def ema_params(opt_state: PyTree) -> Any | None:
    """Returns the averaged parameters (float32) held in an optimizer state, or None.

    It works on any tree of optax states, including trees of `jax.ShapeDtypeStruct` or shardings.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, EmaState))
    return next((node.params for node in nodes if isinstance(node, EmaState)), None)
