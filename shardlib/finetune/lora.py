"""Low-rank adapters: trained factors of a change of each frozen projection.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; Liu et al. 2024,
"DoRA: Weight-Decomposed Low-Rank Adaptation", equation 5, for trained magnitudes.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.config import configclass
from shardlib.errors import ModelError
from shardlib.functional.projections import (
    axes_of,
    matched,
    modules,
    num_dims,
    replace_module,
    variable,
)
from shardlib.functional.quantized import Kind, QuantizedKernel, quantize
from shardlib.nn.stack import stack_layers

TARGETS = ("**/attention/*",)
"""Patterns over the paths of modules: by default all projections of attention."""


@configclass
class LoraConfig:
    """Low-rank adapters in place of training all parameters."""

    rank: int = 8
    """Dims between the two factors of an adapter."""
    alpha: float = 16.0
    """An adapter's result is multiplied by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """Patterns over the paths of projections that get an adapter, as in `**/mlp/*`."""
    dropout: float = 0.0
    """Fraction of the inputs of an adapter that training drops."""
    dora: bool = False
    """Whether the norms of the weights of each output are trained, too (DoRA). Each pass then
    computes the norms of the changed kernels."""
    quantize: Kind | None = None
    """Bits of the frozen projections of all layers: int8, or nf4 (QLoRA); null for kernels as they
    are."""

    @staticmethod
    def faults_of_fields(values: Any) -> list[str]:
        """Returns the faults of the rank and alpha."""
        faults = []
        if values.get("rank", 1) < 1:
            faults.append(f"rank must be at least 1, not {values['rank']}")
        if not 0.0 < values.get("alpha", 1.0) < math.inf:
            faults.append(f"alpha must be greater than 0 and finite, not {values['alpha']}")
        if not 0.0 <= values.get("dropout", 0.0) < 1.0:
            faults.append(f"dropout must be at least 0 and below 1, not {values['dropout']}")
        return faults

    def adapted(self, model: nnx.Module, rngs: nnx.Rngs) -> Any:
        """Returns a model with its layers quantized, if asked for, and with adapters."""
        if self.quantize is not None:
            model = quantize(model, self.quantize)
        sizes: Any = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}
        return lora(model, **sizes, dropout=self.dropout, dora=self.dora, rngs=rngs)


class Adapted(nnx.Module):
    """A frozen projection with an adapter: `base(x) + scale * (x @ lora_a) @ lora_b`.

    With DoRA, the weights of each output are then scaled to the norm `lora_magnitude`.
    """

    def __init__(
        self,
        base: Any,
        rank: int,
        scale: float,
        *,
        dropout: float = 0.0,
        dora: bool = False,
        rngs: nnx.Rngs,
    ):
        self.base, self.scale = base, scale
        (num_inputs, num_outputs), shape = num_dims(base), base.kernel.shape
        names, num_dims_in = axes_of(base.kernel), len(shape) - num_outputs
        leading = num_dims_in - num_inputs
        self.num_inputs = num_inputs
        first = (*shape[:num_dims_in], rank)
        second = (*shape[:leading], rank, *shape[num_dims_in:])
        # Uniform with the variance of a projection; the second factor starts at 0, so that an
        # adapter changes nothing at first.
        bound = 1.0 / math.sqrt(math.prod(shape[leading:num_dims_in]))
        drawn = jax.random.uniform(rngs.params(), first, minval=-bound, maxval=bound)
        rank_axis = "lora_rank" if any(names) else None
        inner, outer = names[:num_dims_in], (*names[:leading], rank_axis, *names[num_dims_in:])
        self.lora_a = variable(nnx.LoRAParam, drawn, (*inner, rank_axis))
        self.lora_b = variable(nnx.LoRAParam, jnp.zeros(second), outer)
        self.dropout = _dropout(dropout, shape[:leading], rngs) if dropout else None
        kept = (*names[:leading], *names[num_dims_in:])
        norms = variable(nnx.LoRAParam, self._norms(base.kernel[...]), kept) if dora else None
        self.lora_magnitude = norms

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Returns the adapted outputs of `x` [..., inputs], in the dtype that `base` gives.

        Other arguments go to `base`.
        """
        y = self.base(x, *args, **options)
        x = (x if self.dropout is None else self.dropout(x)).astype(y.dtype)
        first = x.ndim - self.num_inputs
        contracted = tuple(range(first, x.ndim)), tuple(range(self.num_inputs))
        a, b = (factor[...].astype(x.dtype) for factor in (self.lora_a, self.lora_b))
        low = jax.lax.dot_general(x, a, (contracted, ((), ())))
        change = self.scale * jax.lax.dot_general(low, b, (((low.ndim - 1,), (0,)), ((), ())))
        # `base` may copy each entry of the first output dim.
        copies = y.shape[first] // change.shape[first]
        if copies > 1:
            change = jnp.repeat(change, copies, axis=first)
        if self.lora_magnitude is None:
            return y + change
        # The norm counts as a constant: section 4.3 of the paper.
        norms = jax.lax.stop_gradient(self._norms(self._changed(self.base.kernel[...])))

        def per_output(values: jax.Array) -> jax.Array:
            values = jnp.repeat(values.astype(y.dtype), copies, axis=0)
            return jnp.expand_dims(values, tuple(range(first)))

        gain = per_output(self.lora_magnitude[...].astype(norms.dtype) / norms)
        bias = getattr(self.base, "bias", None)
        if bias is None:
            return gain * (y + change)
        return gain * (y - per_output(bias[...]) + change) + per_output(bias[...])

    def merged(self) -> Any:
        """Returns the projection with the adapter in its kernel: computed in float32, rounded
        once."""
        kernel = self.base.kernel

        def whole(kernel: jax.Array) -> jax.Array:
            changed = self._changed(kernel)
            if self.lora_magnitude is not None:
                gain = self.lora_magnitude[...].astype(jnp.float32) / self._norms(changed)
                changed = changed * jnp.expand_dims(gain, self._dims_of_inputs)
            return changed.astype(kernel.dtype)

        value = kernel[...]
        placed = value.sharding if isinstance(kernel, nnx.Variable) else None
        base = nnx.clone(self.base)
        merged = jax.jit(whole, out_shardings=placed)(value)
        base.kernel = variable(nnx.Param, merged, axes_of(kernel))
        return base

    @property
    def _dims_of_inputs(self) -> tuple[int, ...]:
        """The dims of the inputs in the kernel, after the leading dims of a stack."""
        last = self.lora_a.ndim - 1
        return tuple(range(last - self.num_inputs, last))

    def _changed(self, kernel: jax.Array) -> jax.Array:
        """Returns the kernel with the product of the factors added, in float32."""
        a, b = (factor[...].astype(jnp.float32) for factor in (self.lora_a, self.lora_b))
        leading = tuple(range(self._dims_of_inputs[0]))
        dims = ((a.ndim - 1,), (len(leading),)), (leading, leading)
        change = jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST)
        return kernel.astype(jnp.float32) + self.scale * change

    def _norms(self, kernel: jax.Array) -> jax.Array:
        """Returns the norm of the weights of each output, in float32."""
        squares = jnp.square(kernel.astype(jnp.float32))
        return jnp.sqrt(jnp.sum(squares, axis=self._dims_of_inputs))


def _dropout(rate: float, stacked: tuple[int, ...], rngs: nnx.Rngs) -> nnx.Dropout:
    """Returns dropout with a key for each layer of a stack."""

    def make(rngs: nnx.Rngs) -> nnx.Dropout:
        return nnx.Dropout(rate, rngs=rngs)

    for size in reversed(stacked):
        make = functools.partial(stack_layers, make, size)
    return make(rngs)


def lora(
    model: nnx.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = TARGETS,
    dropout: float = 0.0,
    dora: bool = False,
    rngs: nnx.Rngs,
) -> Any:
    """Returns a model with adapters, which shares its arrays with `model` and gives its results.

    Train it with `sl.init_state(..., wrt=nnx.LoRAParam)`: everything else is frozen, and has
    neither gradients nor optimizer state.

    Args:
        model: Any NNX model; `model` itself is not changed.
        rank: See `LoraConfig`.
        alpha: See `LoraConfig`.
        targets: See `LoraConfig`; routers of experts and modules of other kinds never match.
        dropout: See `LoraConfig`. It acts while the model is in training mode (`model.train()`).
        dora: See `LoraConfig`.
        rngs: Streams for the first factors and for dropout.

    Raises:
        ModelError: If the rank, alpha or dropout is out of range, or a pattern matches no
            projection, an `nnx.Conv` or `nnx.Einsum`, or a projection with two paths.
    """
    faults = LoraConfig.faults_of_fields({"rank": rank, "alpha": alpha, "dropout": dropout})
    if faults:
        raise ModelError("\n".join(faults) + "\n  Take the defaults: rank=8, alpha=16, dropout=0.")
    model = nnx.merge(*nnx.split(model))
    for path, base in matched(model, targets, for_adapters=True).items():
        one = Adapted(base, rank, alpha / rank, dropout=dropout, dora=dora, rngs=rngs)
        replace_module(model, path, one)
    return model


def merge(source: Any) -> Any:
    """Returns the model of a training state, or a model, with its adapters in its kernels, and all
    kernels whole: those in few bits are widened."""
    model = getattr(source, "model", source)
    model = nnx.merge(*nnx.split(model))
    for path, module in adapters(model).items():
        replace_module(model, path, module.merged())
    for module in modules(model).values():
        if isinstance(kernel := getattr(module, "kernel", None), QuantizedKernel):
            module.kernel = variable(nnx.Param, kernel[...], axes_of(kernel))
    return model


def adapters(model: nnx.Module) -> dict[str, Adapted]:
    """Returns the adapted projections of a model by path."""
    return {path: one for path, one in modules(model).items() if isinstance(one, Adapted)}
