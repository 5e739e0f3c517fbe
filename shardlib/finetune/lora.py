"""Low-rank adapters: trained factors of a change of each frozen projection.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlib.config import configclass
from shardlib.errors import ModelError
from shardlib.finetune.projections import (
    axes_of,
    matched,
    modules,
    num_dims,
    replace_module,
    variable,
)
from shardlib.finetune.quantized import Kind, quantize

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
    quantize: Kind | None = None
    """Bits of the frozen projections of all layers: int8, or nf4 (QLoRA); null for all bits."""

    @staticmethod
    def faults_of_fields(values: Any) -> list[str]:
        """Returns the faults of the rank and alpha."""
        faults = []
        if values.get("rank", 1) < 1:
            faults.append(f"rank must be at least 1, not {values['rank']}")
        if not 0.0 < values.get("alpha", 1.0) < math.inf:
            faults.append(f"alpha must be greater than 0 and finite, not {values['alpha']}")
        return faults

    def adapted(self, model: nnx.Module, rngs: nnx.Rngs) -> Any:
        """Returns a model with its layers quantized, if asked for, and with adapters."""
        if self.quantize is not None:
            model = quantize(model, self.quantize)
        options = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets}
        return lora(model, rngs=rngs, **options)


class Adapted(nnx.Module):
    """A frozen projection with an adapter: `base(x) + scale * (x @ lora_a) @ lora_b`."""

    def __init__(self, base: Any, rank: int, scale: float, *, rngs: nnx.Rngs):
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

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        """Returns the adapted outputs of `x` [..., inputs]; other arguments go to `base`."""
        y = self.base(x, *args)
        first = x.ndim - self.num_inputs
        contracted = tuple(range(first, x.ndim)), tuple(range(self.num_inputs))
        a, b = (factor[...].astype(x.dtype) for factor in (self.lora_a, self.lora_b))
        low = jax.lax.dot_general(x, a, (contracted, ((), ())))
        change = self.scale * jax.lax.dot_general(low, b, (((low.ndim - 1,), (0,)), ((), ())))
        if change.shape != y.shape:
            # Copies of each entry of the first output dim, as `base` makes them.
            change = jnp.repeat(change, y.shape[first] // change.shape[first], axis=first)
        return y + change

    def merged(self) -> Any:
        """Returns the projection with the adapter in its kernel: computed in float32, rounded
        once."""
        kernel, a, b = self.base.kernel, self.lora_a[...], self.lora_b[...]
        leading = tuple(range(a.ndim - self.num_inputs - 1))
        dims = ((a.ndim - 1,), (len(leading),)), (leading, leading)

        def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            change = jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST)
            return (kernel.astype(jnp.float32) + self.scale * change).astype(kernel.dtype)

        value = kernel[...]
        placed = value.sharding if isinstance(kernel, nnx.Variable) else None
        whole = jax.jit(add, out_shardings=placed)(value, a, b)
        base = nnx.clone(self.base)
        base.kernel = variable(nnx.Param, whole, axes_of(kernel))
        return base


def lora(
    model: nnx.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] = TARGETS,
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
        rngs: Streams for the first factors.

    Raises:
        ModelError: If the rank or alpha is out of range, or a pattern matches no projection.
    """
    faults = LoraConfig.faults_of_fields({"rank": rank, "alpha": alpha})
    if faults:
        raise ModelError("\n".join(faults) + "\n  Take rank=8 and alpha=16, the defaults.")
    model = nnx.merge(*nnx.split(model))
    for path, base in matched(model, targets).items():
        replace_module(model, path, Adapted(base, rank, alpha / rank, rngs=rngs))
    return model


def merge(source: Any) -> Any:
    """Returns the model of a training state, or a model, with its adapters in its kernels."""
    model = getattr(source, "model", source)
    model = nnx.merge(*nnx.split(model))
    for path, module in adapters(model).items():
        replace_module(model, path, module.merged())
    return model


def adapters(model: nnx.Module) -> dict[str, Adapted]:
    """Returns the adapted projections of a model by path."""
    return {path: one for path, one in modules(model).items() if isinstance(one, Adapted)}
