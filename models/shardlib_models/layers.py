"""The layers of a transformer, with logical axes on every parameter and activation."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.constrain import constrain


def parameter(value: jax.Array, *logical_axes: str) -> nnx.Param:
    """Returns a parameter with one logical axis for each dim.

    Logical names are no mesh axes, so Flax must not place the value by them when it is made.
    """
    return nnx.Param(value, out_sharding=logical_axes, eager_sharding=False)


class Linear(nnx.Module):
    """`x[..., inputs] @ kernel[inputs, outputs] + bias[outputs]`, over any number of dims."""

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        stddev: float,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        """Args: the sizes of the dims by logical axis, and the deviation of the kernel."""
        self.num_inputs = len(inputs)
        shape = (*inputs.values(), *outputs.values())
        kernel = stddev * jax.random.normal(rngs.params(), shape)
        self.kernel = parameter(kernel, *inputs, *outputs)
        self.bias = parameter(jnp.zeros(tuple(outputs.values())), *outputs) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        contracted = tuple(range(x.ndim - self.num_inputs, x.ndim)), tuple(range(self.num_inputs))
        y = jax.lax.dot_general(x, self.kernel[...], (contracted, ((), ())))
        if self.bias is None:
            return y
        bias = self.bias[...]
        return y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dim, computed in float32.

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"; Ba et al. 2016, "Layer
    Normalization".
    """

    def __init__(self, size: int, *, kind: str, eps: float):
        self.eps = eps
        self.scale = parameter(jnp.ones(size), "norm")
        self.bias = parameter(jnp.zeros(size), "norm") if kind == "layer" else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        leading = tuple(range(x.ndim - 1))
        y = y * jnp.expand_dims(self.scale[...].astype(jnp.float32), leading)
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...].astype(jnp.float32), leading)
        return y.astype(x.dtype)


class Embedding(nnx.Module):
    """A table of vectors: looked up by id, or multiplied with to give a logit for each id."""

    def __init__(self, size: int, embed_dim: int, axis: str, *, stddev: float, rngs: nnx.Rngs):
        self.axis = axis
        table = stddev * jax.random.normal(rngs.params(), (size, embed_dim))
        self.embedding = parameter(table, axis, "embed")

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the vectors [batch, length, embed] of `ids` [batch, length] int32."""
        # Gathered along embed first: from a table sharded on both dims XLA would replicate whole
        # activations. Sharded over the ids alone, each device looks up its own rows and the sum
        # over devices gives the vectors.
        table = constrain(self.embedding[...], self.axis, "embed")
        return table.at[ids].get(mode="clip")

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns the logits [batch, length, size] of `x` [batch, length, embed]."""
        return jax.lax.dot_general(x, self.embedding[...], (((2,), (1,)), ((), ())))


def dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns a dropout layer, without a random stream where there is nothing to drop."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


def residual_stddev(stddev: float, num_layers: int) -> float:
    """Returns the initial deviation of projections that add to the residual stream.

    Each of `num_layers` layers adds twice, so dividing by sqrt(2 * num_layers) keeps the variance
    of the sum independent of the depth.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", sec. 2.3.
    """
    return stddev / math.sqrt(2 * num_layers)
