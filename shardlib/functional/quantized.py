"""Frozen kernels in 8 or 4 bits, which shrink the base of a fine-tuning run and a served model.

- `int8`: one scale for each output; the largest weight is 127.
- `nf4`: 16 levels that hold equal shares of a normal distribution, two weights a byte, one scale
  for 64 weights along the last dim of the inputs.

A kernel is widened where it is read, so that the modules that read it stay as they are.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", sec. 3 and appendix E
(the levels of NormalFloat); Dettmers et al. 2022, "LLM.int8()", sec. 2, for scales by output.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlib.errors import ModelError, did_you_mean
from shardlib.functional.projections import axes_of, matched, num_dims, variable

Kind = Literal["int8", "nf4"]
Bits = Literal["int8"]
"""Formats of 8 bits for the weights and the cache of a served model, in place of its dtype."""

_BLOCK = 64
_LEVELS = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


class Frozen(nnx.Variable):
    """The weights of a quantized kernel, integers."""


class QuantizedKernel(nnx.Module):
    """A kernel in few bits, read as `kernel[...]` like a parameter; see the module.

    Leading dims, as in a stack of layers, are kept. It is read in `dtype`; None stands for that of
    the scales.
    """

    def __init__(
        self,
        kernel: Any,
        kind: Kind,
        num_inputs: int,
        num_outputs: int,
        dtype: jax.typing.DTypeLike | None = None,
    ):
        self.kind, self.num_outputs, self.read_dtype = kind, num_outputs, dtype
        self.names = axes_of(kernel)
        last = len(kernel.shape) - num_outputs
        if kind == "int8":
            values, scales = _to_int8(kernel[...], tuple(range(last - num_inputs, last)))
            scaled = range(last - num_inputs, last)
        else:
            values, scales = _to_nf4(kernel[...], last - 1)
            scaled = range(last - 1, last)
        # Few scales: the dims that they sum up are not divided.
        names = tuple(None if dim in scaled else name for dim, name in enumerate(self.names))
        self.values = variable(Frozen, values, self.names)
        # A parameter, so that a precision policy gives it the dtype of the computation.
        self.scales = variable(nnx.Param, scales, names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the kernel."""
        shape = self.values[...].shape
        if self.kind == "int8":
            return shape
        last = len(shape) - self.num_outputs - 1
        return (*shape[:last], 2 * shape[last], *shape[last + 1 :])

    @property
    def ndim(self) -> int:
        """The number of dims of the kernel."""
        return len(self.shape)

    def get_metadata(self) -> dict[str, Any]:
        """Returns the logical axes of the kernel, as a parameter has them in its metadata."""
        return {"out_sharding": self.names[len(self.names) - self.ndim :]}

    def __getitem__(self, index: Any) -> jax.Array:
        """Returns the kernel, or a part of it."""
        kernel = self._widened()
        return (kernel if self.read_dtype is None else kernel.astype(self.read_dtype))[index]

    def _widened(self) -> jax.Array:
        """Returns the kernel in the dtype of the scales."""
        values, scales = self.values[...], self.scales[...]
        if self.kind == "int8":
            return values.astype(scales.dtype) * scales
        last = values.ndim - self.num_outputs - 1
        codes = jnp.stack([values >> 4, values & 15], axis=last + 1)
        levels = jnp.asarray(_LEVELS, scales.dtype)[codes.astype(jnp.int32)]
        blocked = levels.reshape(*scales.shape[: last + 1], -1, *scales.shape[last + 1 :])
        return (blocked * jnp.expand_dims(scales, last + 1)).reshape(self.shape)


def quantize(
    model: nnx.Module,
    kind: Kind,
    *,
    targets: Sequence[str] = ("**layers/**",),
    keep_dtype: bool = False,
) -> Any:
    """Returns a model whose projections hold their kernels in few bits; `model` is not changed.

    Apply it before `lora`: a quantized kernel is frozen.

    Args:
        model: Any NNX model.
        kind: `int8` or `nf4`.
        targets: Patterns over the paths of projections; by default all of stacked layers.
        keep_dtype: Whether kernels are read in the dtype that they had. Otherwise it is that of
            their scales, which a precision policy sets.

    Raises:
        ModelError: If the kind is unknown, a pattern matches no projection, or a kernel does not
            divide into pairs of weights for `nf4`; the message lists all such kernels.
    """
    if kind not in get_args(Kind):
        raise ModelError(
            f"no quantization is called {kind!r}.{did_you_mean(str(kind), get_args(Kind))}\n"
            f"  Choose one of: {', '.join(get_args(Kind))}."
        )
    model = nnx.merge(*nnx.split(model))
    found = matched(model, targets)
    odd = [path for path, one in found.items() if kind == "nf4" and _last_input(one) % 2]
    if odd:
        raise ModelError(
            f"nf4 holds pairs of weights, but the inputs of {', '.join(odd)} are of odd size.\n"
            "  Leave them out of targets, or use int8."
        )
    for module in found.values():
        dtype = module.kernel[...].dtype if keep_dtype else None
        module.kernel = QuantizedKernel(module.kernel, kind, *num_dims(module), dtype)
    return model


def check_bits(**kinds: str | None) -> None:
    """Raises `ModelError` for bits that weights or the cache cannot have."""
    if wrong := [
        f"{name}={kind!r}" for name, kind in kinds.items() if kind not in (None, *get_args(Bits))
    ]:
        raise ModelError(
            f"{', '.join(wrong)} is not known.\n  Give 'int8', or leave it out for the dtype of "
            "the model."
        )


def as_served(model: nnx.Module, dtype: jax.typing.DTypeLike, bits: Bits | None) -> nnx.Module:
    """Returns a model in evaluation mode whose numbers have `dtype`, and its kernels of layers 8
    bits if asked for. Meant to be traced: `model` is changed."""
    model.eval()
    numbers = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, nnx.state(model)
    )
    nnx.update(model, numbers)
    return model if bits is None else quantize(model, bits, keep_dtype=True)


def _last_input(module: Any) -> int:
    """Returns the size of the last dim of the inputs."""
    shape, (_, num_outputs) = module.kernel.shape, num_dims(module)
    return shape[len(shape) - num_outputs - 1]


# Compiled, so that no float32 copy of a stack of layers is made.
@functools.partial(jax.jit, static_argnums=1)
def _to_int8(kernel: jax.Array, dims: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(jnp.abs(kernel.astype(jnp.float32)), axis=dims, keepdims=True)
    scales = jnp.where(largest > 0, largest, 1.0) / 127.0
    return jnp.round(kernel.astype(jnp.float32) / scales).astype(jnp.int8), scales


def _to_nf4(kernel: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    size = kernel.shape[dim]
    block = next(n for n in range(min(_BLOCK, size), 0, -1) if size % n == 0)
    shape = (*kernel.shape[:dim], size // block, block, *kernel.shape[dim + 1 :])
    blocks = kernel.astype(jnp.float32).reshape(shape)
    largest = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
    scales = jnp.where(largest > 0, largest, 1.0)
    middles = jnp.asarray((_LEVELS[1:] + _LEVELS[:-1]) / 2)
    codes = jnp.searchsorted(middles, blocks / scales).astype(jnp.uint8).reshape(kernel.shape)
    pairs = codes.reshape(*kernel.shape[:dim], size // 2, 2, *kernel.shape[dim + 1 :])
    first, second = (jax.lax.index_in_dim(pairs, n, dim + 1, keepdims=False) for n in (0, 1))
    return (first << 4) | second, jnp.squeeze(scales, dim + 1)
