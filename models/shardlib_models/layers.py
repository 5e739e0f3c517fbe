"""The layers of a transformer, with logical axes on every parameter and activation."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.nn.lookup import lookup
from shardlib.nn.project import project
from shardlib.sharding.constrain import active, constrain


def parameter(value: jax.Array, *logical_axes: str, float32: bool = False) -> nnx.Param:
    """Returns a parameter with one logical axis for each dim; with `float32`, no precision policy
    rounds it.

    Logical names are not mesh axes, so Flax must not place the new value by them.
    """
    kept = {"float32": True} if float32 else {}
    return nnx.Param(value, out_sharding=logical_axes, eager_sharding=False, **kept)


class Linear(nnx.Module):
    """`x[..., inputs] @ kernel[inputs, outputs] + bias[outputs]`, over any number of dims."""

    def __init__(
        self,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        stddev: float,
        bias: bool = False,
        float32: bool = False,
        rngs: nnx.Rngs,
    ):
        """Args: the sizes of the dims by logical axis, the standard deviation of the kernel, and
        whether kernel and bias are exempt from rounding by precision policies."""
        self.num_inputs = len(inputs)
        self.axes, self.outputs = (*inputs, *outputs), tuple(outputs)
        # As in `nnx.Linear`: a precision policy may put another product here.
        self.dot_general = jax.lax.dot_general
        shape = (*inputs.values(), *outputs.values())
        # A draw that is multiplied by 0 would be compiled all the same.
        kernel = stddev * jax.random.normal(rngs.params(), shape) if stddev else jnp.zeros(shape)
        self.kernel = parameter(kernel, *inputs, *outputs, float32=float32)
        zeros = jnp.zeros(tuple(outputs.values()))
        self.bias = parameter(zeros, *outputs, float32=float32) if bias else None

    def __call__(self, x: jax.Array, copies: int = 1) -> jax.Array:
        """Returns the outputs; `copies` repeats each entry of their first dim in a row."""
        kernel = self.kernel[...]
        if copies > 1:
            axes = (*[None] * self.num_inputs, *self.outputs)
            kernel = constrain(jnp.repeat(kernel, copies, axis=self.num_inputs), *axes)
        if self.dot_general is jax.lax.dot_general:
            y = project(x, kernel, self.axes, self.num_inputs)
        else:
            last = tuple(range(x.ndim - self.num_inputs, x.ndim))
            y = self.dot_general(x, kernel, ((last, tuple(range(self.num_inputs))), ((), ())))
        if self.bias is None:
            return y
        bias = jnp.repeat(self.bias[...], copies, axis=0)
        return y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dim, computed in float32.

    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"; Ba et al. 2016, "Layer
    Normalization".
    """

    def __init__(
        self,
        size: int,
        *,
        kind: str,
        eps: float,
        offset: float = 0.0,
        heads: dict[str, int] | None = None,
    ):
        """Args: the size of the dim; `rms` or `layer`; the value added to the variance, and the one
        added to the scale; the heads, in the dim before the last, that have a scale each and no
        bias, None for one scale."""
        self.kind, self.eps, self.offset = kind, eps, offset
        dims = {"norm": size} if heads is None else {**heads, "head_dim": size}
        self.scale = parameter(jnp.full(tuple(dims.values()), 1.0 - offset), *dims)
        biased = kind == "layer" and heads is None
        self.bias = parameter(jnp.zeros(size), "norm") if biased else None

    def __call__(self, x: jax.Array, copies: int = 1) -> jax.Array:
        """Returns the normalised vectors, whose heads are `copies` of each head with a scale."""
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        scale = scale + self.offset if self.offset else scale
        scale = jnp.repeat(scale, copies, axis=0) if scale.ndim > 1 else scale
        y = y * jnp.expand_dims(scale, tuple(range(x.ndim - scale.ndim)))
        if self.bias is not None:
            bias = self.bias[...].astype(jnp.float32)
            y = y + jnp.expand_dims(bias, tuple(range(x.ndim - 1)))
        return y.astype(x.dtype)


class Embedding(nnx.Module):
    """A table of vectors: looked up by id, or multiplied with to give a logit for each id."""

    def __init__(
        self,
        size: int,
        embed_dim: int,
        axis: str,
        *,
        width: str = "embed",
        stddev: float,
        rngs: nnx.Rngs,
    ):
        """Args: the numbers of ids and of dims, and the logical axes of both."""
        self.axis, self.width, self.size = axis, width, size
        table = stddev * jax.random.normal(rngs.params(), (size, embed_dim))
        self.embedding = parameter(table, axis, width)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the vectors [batch, length, width] of `ids` [batch, length] int32."""
        axes = self.axis, self.width
        return lookup(
            self.embedding[...], ids, axes, vector_axes=("batch", "residual_length", self.width)
        )

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns the logits [batch, length, size] of `x` [batch, length, width]."""
        return jax.lax.dot_general(x, self.embedding[...], (((2,), (1,)), ((), ())))


def residual(x: jax.Array) -> jax.Array:
    """Places [batch, length, embed] as the residual stream.

    The rules may cut its length further than for attention and MLP. Over `tensor`, the sum over
    devices that ends a branch is then a reduce-scatter, and `whole` an all-gather.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", sec. 4.2.2.
    """
    return constrain(x, "batch", "residual_length", "embed")


def whole(x: jax.Array) -> jax.Array:
    """Places [batch, length, embed] as the projections of attention and MLP read it."""
    # The residual placement first: else XLA gathers an earlier value, such as a float32 one of
    # twice the bytes.
    return constrain(residual(x), "batch", "length", "embed")


@jax.custom_vjp
def read_by_head(x: jax.Array) -> jax.Array:
    """Places [batch, length, embed] as `whole` does, and its gradient as the residual stream.

    A head orders its backward pass by barriers, through which XLA for GPUs makes no reduce-scatter
    of a sum that is placed whole first.
    """
    return whole(x)


read_by_head.defvjp(lambda x: (whole(x), None), lambda _, gradient: (residual(gradient),))


def num_parts(logical_axis: str, size: int) -> int:
    """Returns the number of parts into which the active rules cut a dim of an activation."""
    scope = active()
    return 1 if scope is None else scope.parts(logical_axis, size)


def dropout(rate: float, rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns a dropout layer, without a random stream if the rate is 0."""
    return nnx.Dropout(rate, rngs=rngs if rate else None)


def residual_stddev(stddev: float, num_layers: int) -> float:
    """Returns the initial standard deviation of projections that add to the residual stream.

    Each of `num_layers` layers adds twice, so dividing by sqrt(2 * num_layers) keeps the variance
    of the sum independent of the depth.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", sec. 2.3.
    """
    return stddev / math.sqrt(2 * num_layers)
