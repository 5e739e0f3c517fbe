"""Lookup of vectors by id in a table that is cut over the mesh.

Where a mesh axis cuts both the width of the table and the ids, as `fsdp` does, each device can
gather the table: it sends its part of all rows to every other device. Or devices exchange vectors:
each looks up its part of the vectors of all ids, and sends the device of each id that part.
Gradients go back in the same way. The exchange sends less where a device has fewer ids than the
table has rows, as in nearly every step of a language model: 4,096 ids of a microbatch against
128,256 rows.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shardlib.mesh import spec_axes
from shardlib.nn.project import slice_axis_of
from shardlib.rules.resolve import Kind
from shardlib.sharding.constrain import active, constrain, is_plain, manual_axes
from shardlib.sharding.manual import can_nest, gather_parts, manual, sum_to_parts, summed_columns

Axes = tuple[str, ...]

EXCHANGE = "exchange_vectors"
"""The named scope of the exchange, by which reports know its collectives."""

MIN_WIDTH = 128
"""Least width of a device's part of the table: a TPU pads narrower vectors to the 128 lanes of a
register. Source: Google Cloud, "System architecture of TPUs", vector unit."""


class _Exchange(NamedTuple):
    """The table, and the mesh axes that cut it and the ids; static, for both regions."""

    shape: tuple[int, ...]
    """Of the table."""
    dtype: Any
    rows: Axes
    width: Axes
    """Mesh axes that cut the dims of the table."""
    batch: Axes
    length: Axes
    """Mesh axes that cut the dims of the ids. All axes of `width` are among them."""
    scattered: Axes
    """Mesh axes of the rows that cut the length of the vectors as well: all or none."""

    @property
    def axes(self) -> Axes:
        """The mesh axes that are manual in the regions."""
        return self.batch + self.length + self.rows

    @property
    def specs(self) -> tuple[P, P, P]:
        """The specs of the table, the ids and the vectors."""
        vectors = P(self.batch, self.length + self.scattered)
        return P(self.rows, self.width), P(self.batch, self.length), vectors

    @property
    def rows_per_device(self) -> int:
        return self.shape[0] // math.prod(map(jax.lax.axis_size, self.rows))

    def of_everyone(self, ids: jax.Array) -> jax.Array:
        """Returns the ids of all devices along the axes of the width, [devices, batch, length], as
        positions in the rows of this device."""
        return self.local(jax.lax.all_gather(ids, self.width) if self.width else ids[None])

    def local(self, ids: jax.Array) -> jax.Array:
        """Returns ids as positions in the rows of this device: past their end for other rows."""
        last = self.shape[0] - 1
        ids = jnp.clip(jnp.where(ids < 0, ids + self.shape[0], ids), 0, last)
        if not self.rows:
            return ids
        rows = self.rows_per_device
        ids = ids - rows * jax.lax.axis_index(self.rows)
        return jnp.where(ids < 0, rows, ids)


def lookup(
    table: jax.Array,
    ids: jax.Array,
    table_axes: tuple[str, str],
    ids_axes: tuple[str, str] = ("batch", "length"),
    vector_axes: tuple[str, str, str] = ("batch", "length", "embed"),
) -> jax.Array:
    """Returns the rows of `table` for `ids`, by the way that sends least.

    Args:
        table: [rows, width], of any float dtype. Its gradient is summed in float32 on each device.
        ids: int32 [batch, length]. One past the last row gets the last row.
        table_axes: Logical axes of the table, as of a parameter.
        ids_axes: Logical axes of the ids.
        vector_axes: Logical axes of the result. Its length may be cut further than that of the ids.

    Returns:
        [batch, length, width] in the dtype of the table.

    Raises:
        RuleError: If an axis has no rule, or a dim cannot be divided.
    """
    if is_plain():
        with jax.named_scope(EXCHANGE):
            return table.at[ids].get(mode="clip")
    exchange = _exchange(table, ids, (table_axes, ids_axes, vector_axes))
    if exchange is not None and _pays(exchange, ids):
        with jax.named_scope(EXCHANGE):
            return constrain(_exchanged(exchange, table, ids), *vector_axes)
    scope = active()
    if scope is not None and exchange is not None and not exchange.rows + exchange.length:
        axis = slice_axis_of(scope, ids.shape[0])
        if axis is not None and exchange.width == exchange.batch == (axis,):
            return constrain(_of_slice(axis, table.shape[0], table, ids), *vector_axes)
    # Gathered along its width first: from a table sharded on both dims XLA would replicate whole
    # activations. First constrained as stored, so that it is sent in its own dtype.
    stored = constrain(table, *table_axes, kind="params")
    gathered = constrain(stored, *table_axes)
    if exchange is not None and _ends_the_process(exchange, ids):
        with jax.named_scope(EXCHANGE):
            narrow = exchange._replace(width=())
            return constrain(_exchanged(narrow, gathered, ids), *vector_axes)
    vectors = gathered.at[ids].get(mode="clip")
    if scope is not None and scope.parts(table_axes[0], table.shape[0]) > 1:
        # Each device looks up its own rows of the table for all positions, and the sum over
        # devices gives the vectors. If cut along length at once, XLA would gather the table.
        vectors = constrain(vectors, *ids_axes, vector_axes[2])
    return constrain(vectors, *vector_axes)


def _exchange(
    table: jax.Array, ids: jax.Array, logical_axes: tuple[tuple[str, ...], ...]
) -> _Exchange | None:
    """Returns how to exchange vectors; None where the exchange does not fit the mesh."""
    scope = active()
    if scope is None or AxisType.Explicit in scope.mesh_here.axis_types:
        return None

    def cut(names: tuple[str, ...], shape: tuple[int, ...], kind: Kind) -> list[Axes]:
        entries = spec_axes(scope.sharding(names, shape, kind).spec, len(shape))
        return [tuple(name for name in entry if scope.sizes[name] > 1) for entry in entries]

    of_table, of_ids, of_vectors = logical_axes
    rows, width = cut(of_table, table.shape, "params")
    batch, length = cut(of_ids, ids.shape, "activations")
    placed = cut(of_vectors, (*ids.shape, table.shape[1]), "activations")
    scattered = placed[1][len(length) :]
    fits = placed == [batch, length + scattered, ()] and scattered in ((), rows)
    if not (fits and can_nest(batch + length + rows)):
        return None
    return _Exchange(table.shape, table.dtype, rows, width, batch, length, scattered)


def _pays(exchange: _Exchange, ids: jax.Array) -> bool:
    """Returns whether devices exchange vectors, because gathering the table sends more."""
    scope = active()
    assert scope is not None

    def parts(mesh_axes: Axes) -> int:
        return math.prod(scope.sizes[name] for name in mesh_axes)

    (num_rows, size), width = exchange.shape, exchange.width
    cuts = exchange.batch + exchange.length
    fewer = ids.size // parts(cuts) < num_rows // parts(exchange.rows)
    wide = size // parts(width) >= MIN_WIDTH
    # In a group along `data` XLA would gather the gradient of all vectors instead.
    in_group = "data" in manual_axes()
    return ((fewer and wide) or in_group) and bool(width) and set(width) <= set(cuts)


def _ends_the_process(exchange: _Exchange, ids: jax.Array) -> bool:
    """Returns whether XLA may end the process when it partitions the lookup.

    XLA of jax 0.12 does in a manual region, in `ExpandDeviceGroupsWithIota`, if one mesh axis cuts
    the rows, another one the ids, and there are at least as many ids as rows.
    """
    apart = bool(exchange.rows) and bool(exchange.batch + exchange.length)
    return bool(manual_axes()) and apart and ids.size >= exchange.shape[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(exchange: _Exchange, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the vectors [batch, length, width].

    Each device looks up its part of the table for all ids of its group along the width's axes. If
    rows are cut too, the sum over their devices is the vector. Then each device sends every other
    device of the group its part of that one's vectors.
    """

    def on_device(table: jax.Array, ids: jax.Array) -> jax.Array:
        everyone = exchange.of_everyone(ids)
        # A position past the end is a row of another device.
        outside = "fill" if exchange.rows else "clip"
        vectors = table.at[everyone].get(mode=outside, fill_value=0 if exchange.rows else None)
        if exchange.scattered:
            vectors = jax.lax.psum_scatter(
                vectors, exchange.scattered, scatter_dimension=2, tiled=True
            )
        elif exchange.rows:
            vectors = jax.lax.psum(vectors, exchange.rows)
        if exchange.width:
            vectors = jax.lax.all_to_all(vectors, exchange.width, split_axis=0, concat_axis=2)
        else:
            vectors = vectors[0]
        return vectors.reshape(*vectors.shape[:2], -1)

    table_spec, ids_spec, vectors_spec = exchange.specs
    region = manual(on_device, exchange.axes, (table_spec, ids_spec), vectors_spec)
    return region(table, ids)


def _exchanged_forward(
    exchange: _Exchange, table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _exchanged(exchange, table, ids), ids


def _exchanged_backward(
    exchange: _Exchange, ids: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    """Returns the gradient of the table, which each device sums over its group's ids first."""
    own = exchange.width + exchange.rows
    apart = tuple(name for name in exchange.axes if name not in own)

    def on_device(ids: jax.Array, gradient: jax.Array) -> jax.Array:
        everyone = exchange.of_everyone(ids)
        devices = everyone.shape[0]
        gradient = gradient.reshape(*gradient.shape[:2], devices, -1)
        if exchange.width:
            gradient = jax.lax.all_to_all(gradient, exchange.width, split_axis=2, concat_axis=0)
        else:
            gradient = gradient[None, ..., 0, :]
        if exchange.scattered:
            gradient = jax.lax.all_gather(gradient, exchange.scattered, axis=2, tiled=True)
        table = jnp.zeros((exchange.rows_per_device, gradient.shape[-1]), jnp.float32)
        table = table.at[everyone].add(gradient.astype(jnp.float32), mode="drop")
        table = table.astype(exchange.dtype)
        return jax.lax.psum(table, apart) if apart else table

    table_spec, ids_spec, vectors_spec = exchange.specs
    region = manual(on_device, exchange.axes, (ids_spec, vectors_spec), table_spec)
    with jax.named_scope(EXCHANGE):
        return region(ids, gradient), None


_exchanged.defvjp(_exchanged_forward, _exchanged_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _of_slice(axis: str, num_rows: int, table: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the vectors where `axis` covers a slice of TPUs, and cuts the width and the batch.

    The table is gathered, and its gradient summed, in two hops: see `sum_to_parts`.
    """

    def on_device(table: jax.Array, ids: jax.Array) -> jax.Array:
        return gather_parts(table, axis, 1).at[ids].get(mode="clip")

    region = manual(on_device, (axis,), (P(None, axis), P(axis)), P(axis))
    return region(table, ids)


def _of_slice_forward(
    axis: str, num_rows: int, table: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _of_slice(axis, num_rows, table, ids), ids


def _of_slice_backward(
    axis: str, num_rows: int, ids: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, None]:
    def on_device(ids: jax.Array, gradient: jax.Array) -> jax.Array:
        table = jnp.zeros((num_rows, gradient.shape[-1]), gradient.dtype)
        table = table.at[jnp.clip(ids, -num_rows, num_rows - 1)].add(gradient)
        # The cut dim comes first; see `project`.
        pieces = summed_columns(num_rows, jax.lax.axis_size(axis))
        sums = [sum_to_parts(table[rows].T, axis, 0) for rows in pieces]
        return jnp.concatenate(sums, axis=-1).T

    region = manual(on_device, (axis,), (P(axis), P(axis)), P(None, axis))
    return region(ids, gradient), None


_of_slice.defvjp(_of_slice_forward, _of_slice_backward)
