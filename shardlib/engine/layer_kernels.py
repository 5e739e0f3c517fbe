"""Products with the kernels of stacked layers that copy no kernel.

A loop over layers slices their stacked kernels, and XLA for CPU copies each slice before a product
reads it: a step writes and reads all kernels once more than it needs. Here the kernels of each
layer are arrays of their own, in the memory of the stack, and the loop chooses the product of its
layer. The program still has one body for all layers.

A product reads the columns of a kernel. Where its rows lie a multiple of 4 KiB apart, the numbers
of a column share a set of the cache, and evict each other: such kernels are stored by column.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.extend.core import Jaxpr, JaxprEqn, Var

from shardlib.functional.protocol import axis_names_of
from shardlib.jaxprs import bind_again, called, is_literal, scan_parts

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general"})
_ALIGNMENT = 64
"""Bytes to which XLA for CPU aligns arrays; it would copy others."""
_LEAST_BYTES = 2**18
"""Bytes of a kernel from which a copy takes longer than the choice of a product, about 20 us."""
_SET_BYTES = 4096
"""Bytes between numbers that share a set of a cache: of the first one, the sets times their lines
of 64 bytes, as of all x86 and ARM cores whose page is as large."""
_BY_COLUMN = 0, 2, 1
"""The dims of a stack of kernels in the order of memory."""


class ByColumn(NamedTuple):
    """A kernel that is stored by column."""

    transposed: jax.Array


LayerKernels = list[tuple[jax.Array | ByColumn, ...]]
"""For each leaf of the parameters, the kernels of its layers; empty for other leaves."""


def stored_by_column(params: nnx.State) -> nnx.State:
    """Returns parameters with a copy of the float32 kernels of which a product reads columns
    slowly, stored by column; the other ones are as they are."""

    def stored(leaf: Any) -> Any:
        stack = _stack_of(leaf)
        if stack is None or stack.ndim != 3 or stack.dtype != jnp.float32:
            return leaf
        if stack.shape[-1] * stack.dtype.itemsize % _SET_BYTES:
            return leaf
        return leaf.replace(jax.device_put(stack, Format(Layout(_BY_COLUMN), stack.sharding)))

    return jax.tree.map(stored, params, is_leaf=_is_variable)


def layer_kernels(params: nnx.State) -> LayerKernels:
    """Returns the kernels of each layer of parameters, in their memory; empty on other platforms
    than a CPU, on several devices, and where all kernels are small."""
    kernels: LayerKernels = []
    for leaf in jax.tree.leaves(params, is_leaf=_is_variable):
        # A variable may hold several arrays, as one of 8 bits does with its scales, or none.
        others = [()] * len(jax.tree.leaves(leaf))
        kernels += [_kernels_of(leaf), *others[1:]] if others else []
    return kernels if any(kernels) else []


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _stack_of(leaf: Any) -> jax.Array | None:
    """Returns the kernels of all layers, if a CPU multiplies by them as they are, else None."""
    stack = leaf.get_value() if _is_variable(leaf) else None
    if not isinstance(stack, jax.Array) or stack.ndim < 3:
        return None
    device, *others = stack.sharding.device_set
    if others or not stack.is_fully_addressable or device.platform != "cpu":
        return None
    names = axis_names_of(leaf.get_metadata().get("out_sharding"), stack.ndim) or (None,)
    # Kernels of 8 bits are widened before a product.
    is_stack = names[0] == "layers" and jnp.issubdtype(stack.dtype, jnp.floating)
    size = stack.nbytes // len(stack)
    return stack if is_stack and size >= _LEAST_BYTES and size % _ALIGNMENT == 0 else None


def _kernels_of(leaf: Any) -> tuple[jax.Array | ByColumn, ...]:
    stack: Any = _stack_of(leaf)
    if stack is None:
        return ()
    (device,) = stack.sharding.device_set
    if stack.format.layout.major_to_minor == _BY_COLUMN:
        transposed = np.from_dlpack(stack).transpose(_BY_COLUMN)
        return tuple(ByColumn(jax.device_put(kernel, device)) for kernel in transposed)
    return tuple(jax.device_put(kernel, device) for kernel in np.asarray(stack))


def with_kernels(function: Callable[..., Any], kernels: LayerKernels) -> Callable[..., Any]:
    """Returns `function(params, *others)` as one whose loops over layers multiply by `kernels`."""

    def run(params: nnx.State, *others: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *others)
        values = jax.tree.leaves((params, *others))
        pairs = zip(jax.tree.leaves(params), kernels, strict=True)
        known = {number: stack for number, (_, stack) in enumerate(pairs) if stack}
        results = _retraced(closed.jaxpr, closed.consts, values, known)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class _LayerKernel:
    """The kernel of the layer at which a loop is."""

    stack: tuple[jax.Array | ByColumn, ...]
    number: jax.Array


_Known = Mapping[int, tuple[jax.Array | ByColumn, ...] | _LayerKernel]
"""The operands of a program or an equation, by their number, that are kernels: all kernels of a
stack outside of the loop, and the kernel of one layer inside."""


def _retraced(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], known: _Known
) -> list[Any]:
    """Retraces a program; `known` are kernels among its arguments."""
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)
    kernels: dict[Any, Any] = {jaxpr.invars[number]: kernel for number, kernel in known.items()}

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        operands = equation.invars
        named = [n for n, x in enumerate(operands) if not is_literal(x) and x in kernels]
        results = _results(
            equation, [*map(read, operands)], {n: kernels[operands[n]] for n in named}
        )
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: JaxprEqn, operands: list[Any], known: _Known) -> Sequence[Any]:
    """Returns the results of an equation for other operands; `known` are kernels among them."""
    if not known:
        return bind_again(equation, operands)
    inner, consts = called(equation)
    if inner is not None:
        skipped = len(operands) - len(inner.invars)
        known = {n - skipped: kernel for n, kernel in known.items() if n >= skipped}
        return _retraced(inner, consts, operands[skipped:], known)
    layers = {n: kernel for n, kernel in known.items() if isinstance(kernel, _LayerKernel)}
    name = equation.primitive.name
    if name == "scan" and not layers:
        return _loop(equation, operands, known)
    if name in _PRODUCTS and len(layers) == 1:
        return [_product(equation, operands, *layers.popitem())]
    return bind_again(equation, operands)


def _loop(scan: JaxprEqn, operands: list[Any], known: _Known) -> list[Any]:
    """Runs a loop over layers whose body knows the number of its layer."""
    body, (fixed, carried) = scan.params["jaxpr"], scan_parts(scan)
    first = fixed + carried
    stacks = [(n, x) for n, x in known.items() if n >= first and not isinstance(x, _LayerKernel)]

    def step(carry: list[Any], inputs: tuple[jax.Array, list[Any]]) -> tuple[list[Any], list[Any]]:
        number, slices = inputs
        kernels = {n: _LayerKernel(stack, number) for n, stack in stacks}
        arguments = [*operands[:fixed], *carry, *slices]
        results = _retraced(body.jaxpr, body.consts, arguments, kernels)
        return results[:carried], results[carried:]

    options = {name: scan.params[name] for name in ("length", "reverse", "unroll")}
    numbers = jnp.arange(options["length"], dtype=jnp.int32)
    over = numbers, operands[first:]
    carry, outputs = jax.lax.scan(step, operands[fixed:first], over, **options)
    return [*carry, *outputs]


def _product(
    equation: JaxprEqn, operands: list[Any], number: int, kernel: _LayerKernel
) -> jax.Array:
    """Returns a product whose operand with a number is the kernel of a layer."""

    def by(layer: jax.Array | ByColumn) -> Callable[[list[Any]], Any]:
        def product(others: list[Any]) -> jax.Array:
            # XLA makes one product of a transpose and a product.
            own = layer.transposed.T if isinstance(layer, ByColumn) else layer
            return bind_again(equation, [*others[:number], own, *others[number:]])[0]

        return product

    others = [*operands[:number], *operands[number + 1 :]]
    return jax.lax.switch(kernel.number, [by(layer) for layer in kernel.stack], others)
