"""Products with kernels of several input or output dims, as `[embed, heads, head_dim]`, or of a
vocabulary.

A mesh axis that shards parameters alone, such as `fsdp`, has the kernel gathered for the product,
and again in the backward pass. There a compiler that reshapes the kernel for each product would
gather it twice: to recompute the outputs, and for the gradient of the inputs. Here both read one
gathered value.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardlib.hardware.clusters import slice_of
from shardlib.mesh import entry_axes, spec_axes
from shardlib.sharding.constrain import Scope, active, is_priced, platform
from shardlib.sharding.manual import gather_parts, manual, sum_to_parts, summed_columns

LEAST_CHIPS = 16
"""Chips of a slice over all of which XLA for TPUs (libtpu 0.0.42) makes an all-reduce of each sum,
also where a device keeps its part alone; slices of 8 chips have none."""
LEAST_GATHERED = 64
"""Chips of a slice of TPU v4 or v5p over all of which libtpu makes an all-reduce of each gather."""
VOCAB = "vocab"
"""The logical axis of the head's outputs. XLA for CPUs and GPUs gathers a head that `tensor` cuts
for each of its two products."""


class _Placed(NamedTuple):
    """Shardings of a kernel, for a product and of its gradient; static."""

    whole: NamedSharding
    gradient: NamedSharding
    slice_axis: str | None
    """The mesh axis over all chips of a TPU slice that cuts the kernel and the batch, if any."""
    hops: int | None
    """The dim of the kernel that is gathered over all chips of the slice in two hops, if any."""
    in_turn: bool
    """Whether the gradient of the inputs is computed first, then the kernel's, then the backward
    pass of the layers. XLA for GPUs computes a head's gradient after all layers, and keeps the
    gradient of the logits for it."""


def project(x: jax.Array, kernel: jax.Array, axes: tuple[str, ...], num_inputs: int) -> jax.Array:
    """Returns the product over the last `num_inputs` dims of `x` and the first ones of `kernel`.

    Args:
        x: [..., inputs] of any float dtype.
        kernel: [inputs, outputs], a parameter of the same dtype.
        axes: Logical axes of the kernel.
        num_inputs: The number of dims of inputs.

    Returns:
        [..., outputs] in the dtype of `x`.

    Raises:
        RuleError: If an axis has no rule, or a dim cannot be divided.
    """
    scope = active()
    if scope is None or AxisType.Explicit in scope.mesh_here.axis_types:
        return _product(x, kernel, num_inputs)
    slice_axis = slice_axis_of(scope, x.shape[0])
    # A cost model reads what is computed, and not the order in which GPUs do it.
    on_gpu = not is_priced() and platform() == "gpu"
    if kernel.ndim == 2 and VOCAB not in axes and slice_axis is None and not on_gpu:
        return _product(x, kernel, num_inputs)
    stored = scope.sharding(axes, kernel.shape, "params")
    summed = Scope(scope.mesh, scope.rules.of("gradients"))
    placed = _Placed(
        scope.sharding(axes, kernel.shape, "activations"),
        summed.sharding(axes, kernel.shape, "params"),
        slice_axis,
        _dim_of(slice_axis, stored, kernel) if scope.mesh.size >= LEAST_GATHERED else None,
        VOCAB in axes and on_gpu,
    )
    if stored.spec == placed.whole.spec:
        return _product(x, kernel, num_inputs)
    # First constrained as stored, so that it is sent in its own dtype; once for both passes, since
    # XLA for GPUs gathers each constrained value separately.
    return _projected(placed, num_inputs, x, jax.lax.with_sharding_constraint(kernel, stored))


def slice_axis_of(scope: Scope, rows: int) -> str | None:
    """Returns the mesh axis that cuts this many rows over all chips of a TPU slice, if any."""
    if not isinstance(scope.mesh, Mesh) or scope.mesh.size < LEAST_CHIPS or platform() != "tpu":
        return None
    cut = scope.sharding(("batch",), (rows,), "activations").spec[0]
    axes = [name for name in entry_axes(cut) if scope.sizes[name] == scope.mesh.size]
    one_slice = len(set(map(slice_of, scope.mesh.devices.flat))) == 1
    return axes[0] if axes and one_slice else None


def _product(x: jax.Array, kernel: jax.Array, num_inputs: int) -> jax.Array:
    contracted = tuple(range(x.ndim - num_inputs, x.ndim)), tuple(range(num_inputs))
    return jax.lax.dot_general(x, kernel, (contracted, ((), ())))


def _dim_of(axis: str | None, sharding: NamedSharding, x: jax.Array) -> int | None:
    """Returns the dim of `x` that a mesh axis cuts alone, if any."""
    spec = spec_axes(sharding.spec, x.ndim)
    return spec.index((axis,)) if (axis,) in spec else None


def _gathered(placed: _Placed, kernel: jax.Array) -> jax.Array:
    axis, dim = placed.slice_axis, placed.hops
    if axis is not None and dim is not None:
        parts = PartitionSpec(*[None] * dim, axis)

        def whole(part: jax.Array) -> jax.Array:
            return gather_parts(part, axis, dim)

        return manual(whole, (axis,), (parts,), PartitionSpec())(kernel)
    return jax.lax.with_sharding_constraint(kernel, placed.whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _projected(placed: _Placed, num_inputs: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _product(x, _gathered(placed, kernel), num_inputs)


def _forward(
    placed: _Placed, num_inputs: int, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not `_projected`, in which the remat policy `dots` would not see the product. The kernel is
    # kept in parts: a whole one of each layer would not fit.
    return _product(x, _gathered(placed, kernel), num_inputs), (x, kernel)


def _backward(
    placed: _Placed, num_inputs: int, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    num_outputs = kernel.ndim - num_inputs
    outputs = tuple(range(gradient.ndim - num_outputs, gradient.ndim))
    of_kernel = outputs, tuple(range(num_inputs, kernel.ndim))
    of_x = jax.lax.dot_general(gradient, _gathered(placed, kernel), (of_kernel, ((), ())))
    if not placed.in_turn:
        return of_x, _of_kernel(placed, num_inputs, x, gradient)
    of_x, gradient = jax.lax.optimization_barrier((of_x, gradient))
    return jax.lax.optimization_barrier((of_x, _of_kernel(placed, num_inputs, x, gradient)))


def _of_kernel(placed: _Placed, num_inputs: int, x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Returns the gradient of the kernel, in its place."""
    batch = tuple(range(x.ndim - num_inputs))
    contracted = (batch, batch), ((), ())
    rank = x.ndim + gradient.ndim - 2 * len(batch)
    mesh, spec = placed.gradient.mesh, spec_axes(placed.gradient.spec, rank)
    if (placed.slice_axis,) in spec:
        return _of_slice(placed.slice_axis, spec, num_inputs, x, gradient)  # type: ignore[arg-type]
    if rank == 2:
        # With the cut dim last: of others XLA for TPUs (libtpu 0.0.42) reduces most whole.
        products = jax.lax.dot_general(gradient, x, contracted)
        swapped = NamedSharding(mesh, PartitionSpec(*reversed(spec)))
        return jax.lax.with_sharding_constraint(products, swapped).T
    products = jax.lax.dot_general(x, gradient, contracted)
    return jax.lax.with_sharding_constraint(products, placed.gradient)


def _of_slice(
    axis: str, spec: tuple[tuple[str, ...], ...], num_inputs: int, x: jax.Array, gradient: jax.Array
) -> jax.Array:
    """Returns the gradient of a kernel where `axis` cuts it and the batch, summed in two hops."""
    dim, batch = spec.index((axis,)), tuple(range(x.ndim - num_inputs))
    # The cut dim comes first: XLA for TPUs (libtpu 0.0.42) makes an all-reduce of a last dim whose
    # parts are a register or two wide.
    swap = dim >= num_inputs
    first, second = (gradient, x) if swap else (x, gradient)
    at, rank = dim - num_inputs if swap else dim, len(spec)

    def on_device(first: jax.Array, second: jax.Array) -> jax.Array:
        # One product: for two, XLA would hold both the logits and their gradient.
        products = jax.lax.dot_general(first, second, ((batch, batch), ((), ())))
        pieces = summed_columns(products.shape[-1], jax.lax.axis_size(axis))
        sums = [sum_to_parts(products[..., piece], axis, at) for piece in pieces]
        return jnp.concatenate(sums, axis=-1)

    rows, parts = PartitionSpec(axis), PartitionSpec(*[None] * at, axis)
    found = manual(on_device, (axis,), (rows, rows), parts)(first, second)
    moved = range(rank - num_inputs), range(num_inputs, rank)
    return jnp.moveaxis(found, *map(tuple, moved)) if swap else found


_projected.defvjp(_forward, _backward)
