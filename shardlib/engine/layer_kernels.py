"""Products with the kernels of stacked layers that copy no kernel.

A loop over layers slices their stacked kernels, and XLA for CPU copies each slice before a product
reads it: a step writes and reads all kernels once more than it needs. Here the kernels of each
layer are arrays of their own, in the memory of the stack, and the loop chooses the product of its
layer. The program still has one body for all layers.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn, Var

from shardlib.functional.protocol import axis_names_of
from shardlib.jaxprs import bind_again, called, is_literal, scan_parts

_PRODUCTS = frozenset({"dot_general", "ragged_dot_general"})
_ALIGNMENT = 64
"""Bytes to which XLA for CPU aligns arrays; it would copy others."""
_LEAST_BYTES = 2**18
"""Bytes of a kernel from which a copy takes longer than the choice of a product, about 20 us."""

LayerKernels = list[tuple[jax.Array, ...]]
"""For each leaf of the parameters, the kernels of its layers; empty for other leaves."""


def layer_kernels(params: nnx.State) -> LayerKernels:
    """Returns the kernels of each layer of parameters, in their memory; empty on other platforms
    than a CPU, on several devices, and where all kernels are small."""
    kernels: LayerKernels = []
    for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        # A variable may hold several arrays, as one of 8 bits does with its scales, or none.
        others = [()] * len(jax.tree.leaves(leaf))
        kernels += [_kernels_of(leaf), *others[1:]] if others else []
    return kernels if any(kernels) else []


def _kernels_of(leaf: Any) -> tuple[jax.Array, ...]:
    stack = leaf.get_value() if isinstance(leaf, nnx.Variable) else None
    if not isinstance(stack, jax.Array) or stack.ndim < 3:
        return ()
    device, *others = stack.sharding.device_set
    if others or not stack.is_fully_addressable or device.platform != "cpu":
        return ()
    names = axis_names_of(leaf.get_metadata().get("out_sharding"), stack.ndim) or (None,)
    # Kernels of 8 bits are widened before a product.
    is_stack = names[0] == "layers" and jnp.issubdtype(stack.dtype, jnp.floating)
    size = stack.nbytes // len(stack)
    if not is_stack or size < _LEAST_BYTES or size % _ALIGNMENT:
        return ()
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

    stack: tuple[jax.Array, ...]
    number: jax.Array


_Known = Mapping[int, tuple[jax.Array, ...] | _LayerKernel]
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

    def by(layer: jax.Array) -> Callable[[list[Any]], Any]:
        return lambda others: bind_again(equation, [*others[:number], layer, *others[number:]])[0]

    others = [*operands[:number], *operands[number + 1 :]]
    return jax.lax.switch(kernel.number, [by(layer) for layer in kernel.stack], others)
