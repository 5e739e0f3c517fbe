"""Products with the kernels of stacked layers that copy no kernel.

A loop over layers slices their stacked kernels, and XLA for CPU copies each slice before a product
reads it: a step writes and reads all kernels once more than it needs. Here the kernels of each
layer are arrays of their own, in the memory of the stack, and the loop chooses the product of its
layer. The program still has one body for all layers.

A product reads the columns of a kernel. Where its rows lie a multiple of 4 KiB apart, the numbers
of a column share a set of the cache, and evict each other. Where rows are long, as in a head, each
number lies in a page of memory of its own. Such kernels are stored by column.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

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
_LONG_ROW_BYTES = 2**16
"""Bytes of a row from which the kernel of a head is stored by column. With 32 rows of a batch, all
heads that were tried, of 30,522 to 50,304 outputs, take 0.55 to 0.82 of the time then."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ByColumn:
    """A kernel that is stored by column."""

    transposed: jax.Array


LayerKernels = list[tuple[jax.Array | ByColumn, ...] | ByColumn]
"""For each leaf of the parameters, the kernels of its layers, or its kernel if it is stored by
column; empty for other leaves."""


def stored_by_column(params: nnx.State) -> nnx.State:
    """Returns parameters with a copy of the float32 kernels of which a product reads columns
    slowly, stored by column; the other ones are as they are."""

    def stored(leaf: Any) -> Any:
        array = _array_of(leaf)
        if array is None or array.dtype != jnp.float32 or not _has_slow_columns(leaf, array):
            return leaf
        return leaf.replace(jax.device_put(array, Format(_by_column(array), array.sharding)))

    return jax.tree.map(stored, params, is_leaf=_is_variable)


def _has_slow_columns(leaf: Any, array: jax.Array) -> bool:
    *_, inputs, outputs = array.shape
    row_bytes = outputs * array.dtype.itemsize
    if array.ndim == 3:
        return _is_stack(leaf, array) and row_bytes % _SET_BYTES == 0
    # Not the biases of all layers, nor an embedding, of which a step reads rows.
    is_head = array.ndim == 2 and outputs > inputs and "layers" not in _names(leaf, array)
    return is_head and row_bytes >= _LONG_ROW_BYTES


def _by_column(array: jax.Array) -> Layout:
    *others, row, column = range(array.ndim)
    return Layout((*others, column, row))


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


def _array_of(leaf: Any) -> jax.Array | None:
    """Returns the matrices of a leaf, if a CPU multiplies by them as they are, else None."""
    array = leaf.get_value() if _is_variable(leaf) else None
    if not isinstance(array, jax.Array) or array.ndim < 2:
        return None
    device, *others = array.sharding.device_set
    if others or not array.is_fully_addressable or device.platform != "cpu":
        return None
    # Kernels of 8 bits are widened before a product.
    return array if jnp.issubdtype(array.dtype, jnp.floating) else None


def _is_stack(leaf: Any, array: jax.Array) -> bool:
    """Returns whether an array is the large kernels of all layers."""
    size = array.nbytes // len(array)
    is_large = size >= _LEAST_BYTES and size % _ALIGNMENT == 0
    return array.ndim > 2 and _names(leaf, array)[0] == "layers" and is_large


def _names(leaf: Any, array: jax.Array) -> tuple[str | None, ...]:
    return axis_names_of(leaf.get_metadata().get("out_sharding"), array.ndim) or (None,)


def _kernels_of(leaf: Any) -> tuple[jax.Array | ByColumn, ...] | ByColumn:
    array: Any = _array_of(leaf)
    if array is None:
        return ()
    (device,) = array.sharding.device_set
    order = array.format.layout.major_to_minor
    is_stack, is_by_column = _is_stack(leaf, array), order == _by_column(array).major_to_minor
    if not is_stack and (array.ndim > 2 or not is_by_column):
        return ()
    in_memory = np.from_dlpack(array).transpose(order) if is_by_column else np.asarray(array)
    if not is_stack:
        return ByColumn(jax.device_put(in_memory, device))
    kernels = (jax.device_put(kernel, device) for kernel in in_memory)
    return tuple(map(ByColumn, kernels) if is_by_column else kernels)


def with_kernels(function: Callable[..., Any], kernels: LayerKernels) -> Callable[..., Any]:
    """Returns `function(params, *others)` as one whose loops over layers multiply by `kernels`."""

    def run(params: nnx.State, *others: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(params, *others)
        values = [
            kernel if isinstance(kernel, ByColumn) else leaf
            for leaf, kernel in zip(jax.tree.leaves(params), kernels, strict=True)
        ]
        values += jax.tree.leaves(others)
        known = {n: x for n, x in enumerate(kernels) if x and not isinstance(x, ByColumn)}
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
    """Retraces a program; `known` are kernels of layers among its arguments, of which some may be
    `ByColumn`."""
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
    return [_by_row(read(atom)) for atom in jaxpr.outvars]


def _by_row(x: Any) -> Any:
    # XLA makes one product of a transpose and a product.
    return x.transposed.T if isinstance(x, ByColumn) else x


def _results(equation: JaxprEqn, operands: list[Any], known: _Known) -> Sequence[Any]:
    """Returns the results of an equation for other operands; `known` are kernels among them."""
    if not known and not any(isinstance(x, ByColumn) for x in operands):
        return bind_again(equation, operands)
    inner, consts = called(equation)
    if inner is not None:
        skipped = len(operands) - len(inner.invars)
        known = {n - skipped: kernel for n, kernel in known.items() if n >= skipped}
        return _retraced(inner, consts, operands[skipped:], known)
    if equation.primitive.name == "cond" and not known:
        return _branches(equation, operands)
    operands = [*map(_by_row, operands)]
    layers = {n: kernel for n, kernel in known.items() if isinstance(kernel, _LayerKernel)}
    name = equation.primitive.name
    if name == "scan" and not layers:
        return _loop(equation, operands, known)
    if name in _PRODUCTS and len(layers) == 1:
        return [_product(equation, operands, *layers.popitem())]
    return bind_again(equation, operands)


def _branches(cond: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    """Runs the branch that is chosen. A transpose outside of it would be computed as an array."""

    def ran(branch: ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda *arguments: _retraced(branch.jaxpr, branch.consts, arguments, {})

    return jax.lax.switch(operands[0], [*map(ran, cond.params["branches"])], *operands[1:])


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
            operands = [*others[:number], _by_row(layer), *others[number:]]
            return bind_again(equation, operands)[0]

        return product

    others = [*operands[:number], *operands[number + 1 :]]
    return jax.lax.switch(kernel.number, [by(layer) for layer in kernel.stack], others)
