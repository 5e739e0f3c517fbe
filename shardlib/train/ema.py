"""The exponential moving average of the parameters, kept in the optimizer state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class EmaState(NamedTuple):
    """State of `average_params`: it has the parameters' structure, so it shards as they do."""

    count: jax.Array
    """Number of updates so far, int32 scalar."""
    params: Any
    """The averaged parameters, float32."""


def average_params(decay: float) -> optax.GradientTransformation:
    """Averages the parameters over the updates. Place it last in a chain.

    After update `t = 1, 2, ...` the average is `d * average + (1 - d) * params` with
    `d = min(decay, (1 + t) / (10 + t))`, so that the initial values of a short run are forgotten
    as fast as those of a long one. The average starts as the initial parameters and is kept in
    float32 whatever the parameters' dtype: bfloat16 would round `1 - decay` away.

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992;
    the bound on the decay is that of TensorFlow's `ExponentialMovingAverage(num_updates=...)`.
    """

    def init(params: Any) -> EmaState:
        # A copy: the average and the parameters are donated as separate buffers.
        copied = jax.tree.map(lambda p: jnp.array(p, dtype=jnp.float32, copy=True), params)
        return EmaState(count=jnp.zeros((), jnp.int32), params=copied)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, EmaState]:
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


def ema_params(opt_state: Any) -> Any | None:
    """Returns the averaged parameters (float32) held in an optimizer state, or None.

    Works on any tree of optax states, also one of `jax.ShapeDtypeStruct` or of shardings.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, EmaState))
    return next((node.params for node in nodes if isinstance(node, EmaState)), None)
