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
from shardlib.paths import matches, nearest_pattern

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

    @staticmethod
    def faults_of_fields(values: Any) -> list[str]:
        """Returns the faults of the rank and alpha."""
        faults = []
        if values.get("rank", 1) < 1:
            faults.append(f"rank must be at least 1, not {values['rank']}")
        if not 0.0 < values.get("alpha", 1.0) < math.inf:
            faults.append(f"alpha must be greater than 0 and finite, not {values['alpha']}")
        return faults


class Adapted(nnx.Module):
    """A frozen projection with an adapter: `base(x) + scale * (x @ lora_a) @ lora_b`.

    A projection is an `nnx.Linear`, or a module whose `kernel` has the dims of its inputs, as many
    as `num_inputs`, before those of its outputs. In a stack of layers all have a leading dim.
    """

    def __init__(self, base: Any, rank: int, scale: float, *, rngs: nnx.Rngs):
        self.base, self.scale = base, scale
        inputs, outputs = _split(base)
        shape, names = base.kernel.shape, _axes(base.kernel)
        leading = tuple(range(len(shape) - len(inputs) - len(outputs)))

        def dims(*parts: int | None) -> tuple[tuple[int, ...], tuple[Any, ...]]:
            """Returns sizes and names of dims of the kernel; None stands for the rank."""
            sizes = tuple(rank if part is None else shape[part] for part in parts)
            return sizes, tuple("lora_rank" if part is None else names[part] for part in parts)

        first, second = dims(*leading, *inputs, None), dims(*leading, None, *outputs)
        # Uniform with the variance of a projection; the second factor starts at 0, so that an
        # adapter changes nothing at first.
        bound = 1.0 / math.sqrt(math.prod(shape[dim] for dim in inputs))
        drawn = jax.random.uniform(rngs.params(), first[0], minval=-bound, maxval=bound)
        self.lora_a = _factor(drawn, first[1])
        self.lora_b = _factor(jnp.zeros(second[0]), second[1])

    def __call__(self, x: jax.Array, *args: Any) -> jax.Array:
        """Returns the adapted outputs of `x` [..., inputs]; other arguments are those of `base`."""
        y = self.base(x, *args)
        num_inputs = len(_split(self.base)[0])
        contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
        a, b = (factor[...].astype(x.dtype) for factor in (self.lora_a, self.lora_b))
        low = jax.lax.dot_general(x, a, (contracted, ((), ())))
        change = self.scale * jax.lax.dot_general(low, b, (((low.ndim - 1,), (0,)), ((), ())))
        if change.shape != y.shape:
            # Copies of each entry of the first output dim, as `base` makes them.
            dim = x.ndim - num_inputs
            change = jnp.repeat(change, y.shape[dim] // change.shape[dim], axis=dim)
        return y + change

    def merged(self) -> Any:
        """Returns the projection with the adapter in its kernel: computed in float32, rounded
        once."""
        kernel = self.base.kernel
        inputs, _ = _split(self.base)
        leading = tuple(range(self.lora_a[...].ndim - len(inputs) - 1))

        def add(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            dims = ((a.ndim - 1,), (len(leading),)), (leading, leading)
            change = jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST)
            return (kernel.astype(jnp.float32) + self.scale * change).astype(kernel.dtype)

        value = kernel[...]
        add = jax.jit(add, out_shardings=getattr(value, "sharding", None))
        base = nnx.clone(self.base)
        base.kernel = kernel.replace(add(value, self.lora_a[...], self.lora_b[...]))
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
    found = projections(model)
    unmatched = [p for p in targets if not any(matches(p, path) for path in found)]
    if unmatched or not targets:
        shown = ", ".join([*found][:8]) + (", ..." if len(found) > 8 else "")
        raise ModelError(
            "".join(
                f"targets: {pattern!r} matches no projection.{nearest_pattern(pattern, found)}\n"
                for pattern in unmatched
            )
            + f"  Give patterns that match some of these: {shown or 'none'}."
        )
    for path, base in found.items():
        if any(matches(pattern, path) for pattern in targets):
            _replace(model, path, Adapted(base, rank, alpha / rank, rngs=rngs))
    return model


def merge(source: Any) -> Any:
    """Returns the model of a training state, or a model, with its adapters in its kernels."""
    model = getattr(source, "model", source)
    model = nnx.merge(*nnx.split(model))
    for path, module in adapters(model).items():
        _replace(model, path, module.merged())
    return model


def adapters(model: nnx.Module) -> dict[str, Adapted]:
    """Returns the adapted projections of a model by path."""
    return {path: module for path, module in _modules(model) if isinstance(module, Adapted)}


def projections(model: nnx.Module) -> dict[str, Any]:
    """Returns the projections of a model that can get an adapter, by path."""
    inner = tuple(f"{path}/" for path in adapters(model))
    return {
        path: module
        for path, module in _modules(model)
        if _is_projection(module) and path and not path.startswith(inner)
    }


def _modules(model: nnx.Module) -> list[tuple[str, Any]]:
    return [
        ("/".join(map(str, path)), node)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
    ]


def _is_projection(module: Any) -> bool:
    kernel = getattr(module, "kernel", None)
    if not isinstance(kernel, nnx.Param) or not callable(module):
        return False
    # A kernel that must stay in float32 is a router, which is read past its module.
    is_kept = kernel.get_metadata().get("float32", False)
    return not is_kept and (isinstance(module, nnx.Linear) or hasattr(module, "num_inputs"))


def _split(module: Any) -> tuple[list[int], list[int]]:
    """Returns the dims of inputs and of outputs of a kernel, counted from its end."""
    num_inputs = getattr(module, "num_inputs", 1)
    num_outputs = len(getattr(module, "outputs", (None,)))
    total = num_inputs + num_outputs
    return list(range(-total, -num_outputs)), list(range(-num_outputs, 0))


def _axes(kernel: nnx.Variable) -> tuple[Any, ...]:
    names = kernel.get_metadata().get("out_sharding")
    return tuple(names) if names is not None else (None,) * len(kernel.shape)


def _factor(value: jax.Array, names: tuple[Any, ...]) -> nnx.LoRAParam:
    if all(name in (None, "lora_rank") for name in names):
        return nnx.LoRAParam(value)
    return nnx.LoRAParam(value, out_sharding=names, eager_sharding=False)


def _replace(model: nnx.Module, path: str, module: Any) -> None:
    *outer, name = path.split("/")
    parent: Any = model
    for part in outer:
        parent = parent[int(part)] if part.isdecimal() else getattr(parent, part)
    if name.isdecimal():
        parent[int(name)] = module
    else:
        setattr(parent, name, module)
