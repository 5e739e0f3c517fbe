"""Low-rank adapters, of which each row of a step has one of its own or none.

All adapters are computed for every row, and the results of others are dropped. With few adapters of
small rank that costs little compared with the frozen projection, and rows need no order.

Source: Chen et al. 2023, "Punica: Multi-Tenant LoRA Serving", for adapters by request.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.errors import ModelError
from shardlib.finetune.lora import Adapted, adapters
from shardlib.functional.projections import axes_of, modules, num_dims, replace_module, variable

NO_ADAPTER = -1
"""The number of rows without an adapter."""
_rows: contextvars.ContextVar[Any] = contextvars.ContextVar("rows", default=None)


@contextlib.contextmanager
def adapter_of_rows(numbers: jax.Array | np.ndarray | None) -> Iterator[None]:
    """Gives each row of the calls inside its adapter: [groups, rows] int32, or `NO_ADAPTER`."""
    token = _rows.set(numbers)
    try:
        yield
    finally:
        _rows.reset(token)


class RowAdapted(nnx.Module):
    """A projection with several adapters: `base(x) + (x @ lora_a[n]) @ lora_b[n]` of row n's."""

    def __init__(self, base: Any, factors: "AdapterFactors"):
        self.base, self.num_inputs = base, num_dims(base)[0]
        self.lora_a = variable(nnx.LoRAParam, factors.a, factors.names[0])
        self.lora_b = variable(nnx.LoRAParam, factors.b, factors.names[1])

    def __call__(self, x: jax.Array, *args: Any, **options: Any) -> jax.Array:
        """Returns the outputs of `x` [groups, rows, inputs], in the dtype that `base` gives."""
        y, numbers = self.base(x, *args, **options), _rows.get()
        if numbers is None:
            return y
        x, first = x.astype(y.dtype), x.ndim - self.num_inputs
        a, b = (factor[...].astype(x.dtype) for factor in (self.lora_a, self.lora_b))
        inputs = tuple(range(first, x.ndim)), tuple(range(1, 1 + self.num_inputs))
        low = jax.lax.dot_general(x, a, (inputs, ((), ())))
        is_own = numbers[..., None] == jnp.arange(a.shape[0], dtype=jnp.int32)[None, None]
        low = jnp.where(is_own[..., None], low, 0)
        both = (low.ndim - 2, low.ndim - 1), (0, 1)
        change = jax.lax.dot_general(low, b, (both, ((), ())))
        # `base` may copy each entry of the first output dim.
        copies = y.shape[first] // change.shape[first]
        return y + (jnp.repeat(change, copies, axis=first) if copies > 1 else change)


class AdapterFactors(NamedTuple):
    """The factors of all adapters of one projection."""

    a: jax.Array
    """[*layers, adapters, *inputs, rank] float32."""
    b: jax.Array
    """[*layers, adapters, rank, *outputs] float32."""
    names: tuple[tuple[Any, ...], tuple[Any, ...]]
    """Logical axes of both."""


def row_factors(model: nnx.Module, given: Mapping[str, Any]) -> dict[str, AdapterFactors]:
    """Returns the factors of adapters by the path of their projection, and no other parameters. The
    order of the given models, as `lora` and `load_adapter` return them, numbers them.

    Raises:
        ModelError: If a model has no adapters, or has some that rows cannot choose (of DoRA,
            experts, or outside of layers), of other shapes, or with numbers that are not finite;
            the message lists all of them.
    """
    found = {name: adapters(getattr(one, "model", one)) for name, one in given.items()}
    faults = [fault for name, one in found.items() for fault in _faults(name, one, modules(model))]
    if faults:
        raise ModelError(
            "\n".join(faults) + "\n  Leave such an adapter out; one of DoRA or of experts can be "
            "merged, and served as a model of its own."
        )
    paths = sorted({path for one in found.values() for path in one})
    return {path: _stacked([one.get(path) for one in found.values()]) for path in paths}


def with_adapters(model: nnx.Module, factors: Mapping[str, AdapterFactors]) -> nnx.Module:
    """Returns a model whose rows may have adapters; its kernels may be quantized."""
    model = nnx.merge(*nnx.split(model))
    every = modules(model)
    for path, one in factors.items():
        replace_module(model, path, RowAdapted(every[path], one))
    return model


def _stacked(given: list[Adapted | None]) -> AdapterFactors:
    """Returns the factors of adapters, 0 where one leaves the projection as it is."""
    some = [one for one in given if one is not None]
    first, rank = some[0], max(one.lora_a.shape[-1] for one in some)
    num_inputs, num_outputs = num_dims(first.base)
    leading = first.lora_a.ndim - num_inputs - 1

    def stacked(name: str, dim: int, scaled: bool) -> jax.Array:
        shape = list(getattr(first, name).shape)
        shape[dim] = rank
        parts = []
        for one in given:
            factor = jnp.zeros(shape) if one is None else getattr(one, name)[...]
            factor = factor.astype(jnp.float32) * (one.scale if one and scaled else 1.0)
            missing = [(0, n - m) for n, m in zip(shape, factor.shape, strict=True)]
            parts.append(jnp.pad(factor, missing))
        return jnp.stack(parts, axis=leading)

    names = axes_of(first.base.kernel)
    outer, outputs = names[:leading], names[len(names) - num_outputs :]
    inputs = names[leading : len(names) - num_outputs]
    return AdapterFactors(
        stacked("lora_a", -1, False),
        stacked("lora_b", leading, True),
        ((*outer, None, *inputs, None), (*outer, None, None, *outputs)),
    )


def _faults(name: str, found: Mapping[str, Adapted], served: Mapping[str, Any]) -> list[str]:
    if not (isinstance(name, str) and name):
        return [f"adapter {name!r} has no name."]
    if not found:
        return [f"adapter {name!r} adapts nothing."]
    faults = []
    for path, one in found.items():
        shape, own = (x and tuple(x.kernel.shape) for x in (one.base, served.get(path)))
        if path not in served:
            faults.append(f"adapter {name!r} has {path}, and the model that is served has not.")
        elif one.lora_magnitude is not None:
            faults.append(f"adapter {name!r} has DoRA at {path}.")
        elif "expert" in axes_of(one.base.kernel) or "layers" not in path:
            faults.append(f"adapter {name!r} has {path}, which rows of a step do not reach alone.")
        elif shape != own:
            faults.append(f"adapter {name!r} is for {path} of {shape}, and the model has {own}.")
        elif not all(bool(jnp.isfinite(x[...]).all()) for x in (one.lora_a, one.lora_b)):
            # It would answer the requests of others too: 0 * inf is NaN.
            faults.append(f"adapter {name!r} has numbers at {path} that are not finite.")
    return faults
