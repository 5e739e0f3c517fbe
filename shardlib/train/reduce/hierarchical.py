"""Hierarchical sums along one mesh axis: within a slice, then between slices, and back.

They run on local shards, in a region in which every mesh axis is manual, so arrays may have any
placement over the other axes.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, PyTree

from shardlib.hardware import slice_of
from shardlib.losses.aggregate import over_axes
from shardlib.mesh import entry_axes
from shardlib.mesh.device_order import count_groups
from shardlib.paths import path_string
from shardlib.sharding.constrain import active
from shardlib.sharding.manual import manual
from shardlib.sharding.partition import Placement

_LARGE = 2**20
"""Number of elements from which an array is sent separately. Smaller arrays are sent together."""


@dataclasses.dataclass(frozen=True)
class Hops:
    """A hierarchical sum along a mesh axis, with an inner and an outer hop.

    The axis is split into `outer` groups of `inner` neighbours. The sum is reduce-scattered within
    each group, then between groups, and gathered in reverse order. Between groups each device sends
    `1 / inner` of its data. All sums are in float32. With bfloat16, a hop rounds each contribution
    once and each result once before sending.

    In bfloat16 the parts are sent by an all-to-all, as 16-bit integers, and added by the receiver.
    A reduce-scatter in bfloat16 would round every partial sum, and XLA for CPU would send float32.
    An all-to-all sends as many bytes as a reduce-scatter. On a ring of n devices it takes n / 4
    times as long, so bfloat16 pays off between slices, whose network is switched.

    Source: Wang et al. 2023, "ZeRO++: Extremely Efficient Collective Communication for Giant Model
    Training", arXiv:2306.10209, section 3.3 (the same exchange, with smaller integers).
    """

    axis: str
    inner: int
    outer: int = 1
    inner_bf16: bool = False
    outer_bf16: bool = False

    @property
    def size(self) -> int:
        return self.inner * self.outer

    @property
    def exact(self) -> bool:
        """Whether no hop rounds to bfloat16."""
        rounds = [self.inner_bf16 and self.inner > 1, self.outer_bf16 and self.outer > 1]
        return not any(rounds)

    @property
    def flat(self) -> bool:
        """Whether it is one sum in float32."""
        return self.exact and 1 in (self.outer, self.inner)

    def scatter(self, pieces: Float[Array, "outer inner ..."]) -> Float[Array, "..."]:
        """Returns this device's piece of the sum, in float32.

        Piece [o, i] goes to the device at index `o * inner + i` of the axis.
        """
        within = jnp.moveaxis(pieces, 1, 0)
        between = _scatter(within, self.axis, self._neighbours, self.inner_bf16)
        return _scatter(between, self.axis, self._peers, self.outer_bf16)

    def gather(self, piece: Float[Array, "..."]) -> Float[Array, "outer inner ..."]:
        """Returns the pieces of all devices."""
        # Values sent between slices in bfloat16 lose nothing if they are sent on in bfloat16.
        rounded = self.inner_bf16 or (self.outer_bf16 and self.outer > 1)
        between = _gather(piece, self.axis, self._peers, self.outer_bf16)
        return jnp.moveaxis(_gather(between, self.axis, self._neighbours, rounded), 0, 1)

    @property
    def _neighbours(self) -> list[list[int]]:
        return np.arange(self.size).reshape(self.outer, self.inner).tolist()

    @property
    def _peers(self) -> list[list[int]]:
        return np.arange(self.size).reshape(self.outer, self.inner).T.tolist()


def _scatter(x: jax.Array, axis: str, groups: list[list[int]], bf16: bool) -> jax.Array:
    """Returns this device's part of the sum over its group: [n, ...] -> [...]."""
    if len(groups[0]) == 1:
        return x[0]
    if not bf16:
        return jax.lax.psum_scatter(x, axis, scatter_dimension=0, axis_index_groups=groups)
    parts = jax.lax.all_to_all(_pack(x), axis, 0, 0, axis_index_groups=groups, tiled=True)
    return jnp.sum(_unpack(parts), axis=0)


def _gather(x: jax.Array, axis: str, groups: list[list[int]], bf16: bool) -> jax.Array:
    """Returns the parts of all devices of a group: [...] -> [n, ...]."""
    if len(groups[0]) == 1:
        return x[None]
    if not bf16:
        return jax.lax.all_gather(x, axis, axis_index_groups=groups)
    return _unpack(jax.lax.all_gather(_pack(x), axis, axis_index_groups=groups))


def _pack(x: jax.Array) -> jax.Array:
    # Integers, because XLA widens bfloat16 on platforms that do not compute in it.
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _unpack(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16).astype(jnp.float32)


def sum_leaves(
    leaves: Sequence[jax.Array],
    dims: Sequence[int | None],
    hops: Hops,
    also: tuple[str, ...] = (),
) -> list[jax.Array]:
    """Returns the sums of float32 arrays along an axis, and along others at once.

    Args:
        leaves: The local shard of each array, with the same shapes on every device of the axis.
        dims: The dim of each array that is scattered over the axis, or None if every device keeps
            the whole sum. The size of the axis divides that dim.
        hops: The axis and its hops.
        also: Other axes, which scatter nothing and sum in float32.
    """
    parts = [
        x if dim is None else _keep_part(x, dim, hops) for x, dim in zip(leaves, dims, strict=True)
    ]
    if also:
        parts = [
            x if dim is None else jax.lax.psum(x, also) for x, dim in zip(parts, dims, strict=True)
        ]
    whole = [x for x, dim in zip(leaves, dims, strict=True) if dim is None]
    if hops.flat:
        sums = iter(jax.lax.psum(whole, (hops.axis, *also)) if whole else [])
    else:
        sums = iter(_all_reduce(whole, hops, also))
    return [next(sums) if dim is None else x for x, dim in zip(parts, dims, strict=True)]


def _keep_part(x: jax.Array, dim: int, hops: Hops) -> jax.Array:
    shape = (hops.outer, hops.inner, x.shape[dim] // hops.size)
    pieces = x.reshape(*x.shape[:dim], *shape, *x.shape[dim + 1 :])
    return hops.scatter(jnp.moveaxis(pieces, (dim, dim + 1), (0, 1)))


def _all_reduce(leaves: Sequence[jax.Array], hops: Hops, also: tuple[str, ...]) -> list[jax.Array]:
    """Returns the sums of arrays, with one flat vector per large array and one for all others.
    Other axes sum the pieces that the hops leave on a device."""
    large = [[at] for at, x in enumerate(leaves) if x.size >= _LARGE]
    small = [at for at, x in enumerate(leaves) if 0 < x.size < _LARGE]
    sums = list(leaves)
    for bucket in [*large, small] if small else large:
        flat = jnp.concatenate([leaves[at].reshape(-1) for at in bucket])
        padded = jnp.pad(flat, (0, -flat.size % hops.size))
        pieces = padded.reshape(hops.outer, hops.inner, -1)
        piece = hops.scatter(pieces)
        piece = jax.lax.psum(piece, also) if also else piece
        total = hops.gather(piece).reshape(-1)[: flat.size]
        ends = np.cumsum([leaves[at].size for at in bucket])[:-1].tolist()
        for at, part in zip(bucket, jnp.split(total, ends), strict=True):
            sums[at] = part.reshape(leaves[at].shape)
    return sums


def sum_groups(
    tree: PyTree,
    scalars: PyTree,
    places: Mapping[str, Placement],
    hops: Hops,
    summed: Collection[str] = (),
    also: tuple[str, ...] = (),
) -> tuple[PyTree, PyTree]:
    """Returns the sums over groups of arrays [groups, ...] that are sharded over the axis of
    `hops`, and after it over the axes in `also`.

    Call it inside `sl.use` and outside of manual regions.

    Args:
        tree: Float32 arrays [groups, ...]. If the placement of a leaf shards a dim over the axis of
            `hops`, the sum stays sharded, and each device gets its own part.
        scalars: Aggregates of each group, [groups, ...], for `aggregate.join`.
        places: Placement of each leaf of `tree` by path, without the dim of the groups.
        hops: The axis and its hops.
        summed: Paths of the leaves of which each group holds the sum.
        also: As in `sum_leaves`.

    Returns:
        Both trees, without the dim of the groups.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [path_string(path) for path, _ in paths]
    specs = [places[name].spec for name in names]
    dims = [kept_dim(spec, hops.axis) for spec in specs]
    groups = (hops.axis, *also)

    def add(leaves: list[jax.Array], scalars: PyTree) -> tuple[list[jax.Array], PyTree]:
        total = over_axes(jax.tree.map(lambda x: x[0], scalars), groups)
        sums = [x[0] for x in leaves]
        at = [index for index, name in enumerate(names) if name not in summed]
        apart = sum_leaves([sums[i] for i in at], [dims[i] for i in at], hops, also)
        for index, x in zip(at, apart, strict=True):
            sums[index] = x
        return sums, total

    # Manual over every axis: each device sends its own shard, and nothing is gathered before.
    scope = active()
    axes = tuple(scope.sizes) if scope else ()
    placed = [PartitionSpec(groups, *_moved(spec, hops.axis, keep=False)) for spec in specs]
    results = [PartitionSpec(*_moved(spec, hops.axis, keep=True)) for spec in specs]
    sums, scalars = manual(add, axes, (placed, PartitionSpec(groups)), (results, PartitionSpec()))(
        [leaf for _, leaf in paths], scalars
    )
    return treedef.unflatten(sums), scalars


def kept_dim(spec: PartitionSpec, axis: str) -> int | None:
    """Returns the dim that a PartitionSpec shards over a mesh axis, or None."""
    return next((dim for dim, names in enumerate(spec) if axis in entry_axes(names)), None)


def _moved(spec: PartitionSpec, axis: str, *, keep: bool) -> list[tuple[str, ...] | None]:
    """Returns the entries of a PartitionSpec without a mesh axis, or with it as the minor axis.

    Parts along the axis are cut out of the data on each device. For any other order of axes the
    compiler moves one part per device.
    """
    entries = []
    for names in map(entry_axes, spec):
        others = tuple(name for name in names if name != axis)
        last = (axis,) if keep and axis in names else ()
        entries.append((*others, *last) or None)
    return entries


def outer_degree(mesh: Mesh | AbstractMesh, axis: str) -> int:
    """Returns the number of equal runs of neighbours along a mesh axis that a slow network joins.

    The runs are slices if there are several, otherwise GPU hosts. The result is 1 if the devices do
    not tell, as on CPU.
    """
    if isinstance(mesh, AbstractMesh) or count_groups(list(mesh.devices.flat)) == 1:
        return 1
    several_slices = len({slice_of(device) for device in mesh.devices.flat}) > 1
    group = slice_of if several_slices else (lambda device: device.process_index)
    along = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)
    ids = np.vectorize(group, otypes=[int])(along).reshape(len(along), -1)
    cuts = 1 + np.flatnonzero(np.any(ids[1:] != ids[:-1], axis=1))
    inner = math.gcd(len(along), *cuts.tolist())
    return len(along) // inner
