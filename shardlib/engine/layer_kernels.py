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

from shardlib.jaxprs import bound, called, is_literal, scan_parts

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
        # A variable may hold several arrays, as one of 8 bits does with its scales.
        kernels += [_kernels_of(leaf), *[()] * (len(jax.tree.leaves(leaf)) - 1)]
    return kernels if any(kernels) else []


def _kernels_of(leaf: Any) -> tuple[jax.Array, ...]:
    axes = leaf.get_metadata().get("out_sharding") if isinstance(leaf, nnx.Variable) else None
    if not axes or axes[0] != "layers":
        return ()
    stack = leaf.get_value()
    if not isinstance(stack, jax.Array) or stack.ndim < 3:
        return ()
    devices = stack.sharding.device_set
    size = stack.nbytes // len(stack)
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return ()
    if size < _LEAST_BYTES or size % _ALIGNMENT:
        return ()
    return tuple(jax.device_put(x, stack.sharding, may_alias=True) for x in np.asarray(stack))


def with_kernels(function: Callable[..., Any], kernels: LayerKernels) -> Callable[..., Any]:
    """Returns `function(params, *others)` as one whose loops over layers multiply by `kernels`."""

    def run(params: nnx.State, *others: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *others)
        values = jax.tree.leaves((params, *others))
        apart = dict(enumerate(kernels))
        results = _retraced(closed.jaxpr, closed.consts, values, apart)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class _OfLayer:
    """The kernel of the layer at which a loop is."""

    layers: tuple[jax.Array, ...]
    number: jax.Array


_Apart = tuple[jax.Array, ...] | _OfLayer
"""What is known of a variable: the kernels of a stack, outside of the loop, or that of a layer."""


def _retraced(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], known: Mapping[int, _Apart]
) -> list[Any]:
    """Retraces a program. `known` has what is known of its arguments, by their number."""
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)
    apart: dict[Any, _Apart] = {jaxpr.invars[at]: one for at, one in known.items() if one}

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else values[atom]

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        of_given = [None if is_literal(atom) else apart.get(atom) for atom in equation.invars]
        here = {number: one for number, one in enumerate(of_given) if one}
        values.update(zip(equation.outvars, _results(equation, given, here), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: JaxprEqn, given: list[Any], known: dict[int, _Apart]) -> Sequence[Any]:
    name = equation.primitive.name
    inner, consts = called(equation) if known else (None, ())
    if inner is not None:
        skipped = len(given) - len(inner.invars)
        known = {number - skipped: one for number, one in known.items() if number >= skipped}
        return _retraced(inner, consts, given[skipped:], known)
    of_layers = {n: one for n, one in known.items() if isinstance(one, _OfLayer)}
    if name == "scan" and len(of_layers) < len(known):
        return _loop(equation, given, known)
    if name in _PRODUCTS and len(of_layers) == 1:
        return [_product(equation, given, *of_layers.popitem())]
    return bound(equation, given)


def _loop(scan: JaxprEqn, given: list[Any], known: dict[int, _Apart]) -> list[Any]:
    """Runs a loop over layers whose body knows the number of its layer."""
    body, (fixed, carried) = scan.params["jaxpr"], scan_parts(scan)
    first = fixed + carried
    sliced = {at: one for at, one in known.items() if at >= first}
    stacks = {at: one for at, one in sliced.items() if not isinstance(one, _OfLayer)}

    def step(carry: list[Any], inputs: tuple[jax.Array, list[Any]]) -> tuple[list[Any], list[Any]]:
        number, slices = inputs
        kernels = {at: _OfLayer(layers, number) for at, layers in stacks.items()}
        arguments = [*given[:fixed], *carry, *slices]
        results = _retraced(body.jaxpr, body.consts, arguments, kernels)
        return results[:carried], results[carried:]

    length = scan.params["length"]
    over = jnp.arange(length, dtype=jnp.int32), given[first:]
    carry, stacked = jax.lax.scan(
        step, given[fixed:first], over, length, reverse=scan.params["reverse"]
    )
    return [*carry, *stacked]


def _product(equation: JaxprEqn, given: list[Any], at: int, kernel: _OfLayer) -> jax.Array:
    """Returns a product with the kernel of a layer, which is the operand `at`."""

    def by(layer: jax.Array) -> Callable[[list[Any]], Any]:
        return lambda others: bound(equation, [*others[:at], layer, *others[at:]])[0]

    others = [*given[:at], *given[at + 1 :]]
    return jax.lax.switch(kernel.number, [by(layer) for layer in kernel.layers], others)
