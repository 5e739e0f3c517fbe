"""Fingerprints of leaves: the same on any mesh, and different for any changed element.

The bits of a leaf are read as planes of 32-bit words: one plane for dtypes of up to 32 bits, two
for 64 bits, and the real before the imaginary part of complex numbers. Each word is mixed with its
flat (row-major) position, and the mixed words of a plane are summed modulo 2^32. The order of a sum
does not matter, so each device sums its own shard under any sharding.

    plane = sum over positions p of  finalize(word[p] XOR p * 0x9E3779B9)   modulo 2^32

`finalize` is the 32-bit finaliser of MurmurHash3, a bijection. A change of one element therefore
always changes the fingerprint: in some plane exactly one word differs, hence exactly one term.
Changes of several elements (swaps, shifts, lost blocks) go undetected with a probability of about
2^-32; deliberate changes can be hidden. Bits are compared, not values: -0.0 differs from 0.0, and
NaNs of different bits differ. Beyond 2^32 words positions repeat.

Source of the finaliser: Appleby, MurmurHash3, `fmix32`,
https://github.com/aappleby/smhasher/wiki/MurmurHash3; the factor of positions is 2^32 / phi,
rounded to an odd number (Knuth, The Art of Computer Programming, vol. 3, section 6.4).
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from shardlib.checkpoint.tree import Leaf, is_key, sharding_of
from shardlib.sharding.host_memory import HOST

Index = int | jax.Array
Words = TypeVar("Words", np.ndarray, jax.Array)
_POSITION = 0x9E3779B9
_FIRST, _SECOND = 0x85EBCA6B, 0xC2B2AE35
_WORD = 0xFFFFFFFF
# Words mixed at a time. On CPUs a few buffers of this size stay in the cache; accelerators need no
# buffers, so fewer and longer blocks are better.
_CPU_BLOCK = 2**16
_DEVICE_BLOCK = 2**26


@dataclasses.dataclass(frozen=True)
class Pending:
    """Fingerprints being computed; the leaves may be donated or changed meanwhile."""

    _host: dict[str, str]
    _device: list[tuple[list[tuple[str, int]], jax.Array]]
    _order: list[str]

    def result(self) -> dict[str, str]:
        """Waits for the devices and returns the fingerprints by path: 8 hex digits per plane."""
        by_path = dict(self._host)
        for planes_of, words in self._device:
            values = iter(np.asarray(words).tolist())
            for path, planes in planes_of:
                by_path[path] = _text([next(values) for _ in range(planes)])
        return {path: by_path[path] for path in self._order}


def dispatch(leaves: Mapping[str, Leaf]) -> Pending:
    """Starts to compute the fingerprints of arrays (typed PRNG keys too) and numbers by path, and
    returns before they are ready.

    One compiled program reads the arrays on the same devices. Numpy arrays, numbers, and arrays on
    one of several processes are read on the host before this returns. Every process must call this
    with the same leaves, in the same order relative to its other programs.
    """
    from shardlib.runtime.distributed import must_block

    device = []
    for group in _by_devices(leaves):
        words = _program(group)(list(group.values()))
        if must_block():
            jax.block_until_ready(words)
        device.append(([(path, _planes_of(leaf)) for path, leaf in group.items()], words))
    host = {path: of_host(leaf) for path, leaf in leaves.items() if not _on_devices(leaf)}
    return Pending(host, device, list(leaves))


def of_host(leaf: Leaf) -> str:
    """Returns the fingerprint of a numpy array or a number, computed by this process."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    array = np.ascontiguousarray(np.asarray(leaf))
    if array.dtype.name == "int4":
        array = array.astype(np.int8)
    size = array.dtype.itemsize
    words = array.reshape(-1).view({1: np.uint8, 2: np.uint16}.get(size, np.uint32))
    planes = max(1, size // 4)
    return _text([_sum_on_host(words[plane::planes]) for plane in range(planes)])


def compile_ahead(leaves: Mapping[str, Leaf]) -> None:
    """Compiles the programs of `dispatch` for leaves, which may be abstract with shardings."""
    for group in _by_devices(leaves):
        _program(group)


def _text(planes: Sequence[int]) -> str:
    return "".join(f"{plane:08x}" for plane in planes)


def _sum_on_host(words: np.ndarray) -> int:
    total = 0
    for start in range(0, words.size, _CPU_BLOCK):
        block = words[start : start + _CPU_BLOCK].astype(np.uint32)
        block ^= np.arange(start, start + block.size, dtype=np.uint64).astype(
            np.uint32
        ) * np.uint32(_POSITION)
        total += int(_finalize(block).sum(dtype=np.uint64))
    return total & _WORD


def _finalize(words: Words) -> Words:
    """Applies Appleby's `fmix32` to an array of uint32 on the host or on devices."""
    u32 = np.uint32
    words = words ^ (words >> u32(16))
    words = words * u32(_FIRST)
    words = words ^ (words >> u32(13))
    words = words * u32(_SECOND)
    return words ^ (words >> u32(16))


def _on_devices(leaf: Leaf) -> bool:
    if sharding_of(leaf) is None or not math.prod(leaf.shape):
        return False
    return not (jax.process_count() > 1 and leaf.sharding.is_fully_addressable)


def _by_devices(leaves: Mapping[str, Leaf]) -> list[dict[str, Leaf]]:
    """Returns the groups of leaves on devices that one program reads: one per set of devices.

    A leaf in host memory gets its own group: the devices have room for only one such leaf at a
    time.
    """
    groups: dict[Any, dict[str, Leaf]] = {}
    for path, leaf in leaves.items():
        if not _on_devices(leaf):
            continue
        alone = path if leaf.sharding.memory_kind == HOST else None
        groups.setdefault((frozenset(leaf.sharding.device_set), alone), {})[path] = leaf
    return list(groups.values())


def _program(group: Mapping[str, Leaf]) -> Any:
    """Returns the compiled program for the leaves of one set of devices."""
    structs = tuple(
        jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=leaf.sharding,
            weak_type=bool(getattr(leaf, "weak_type", False)),
        )
        for leaf in group.values()
    )
    with _compiling:  # A second thread finds the program in the cache.
        return _compiled(structs)


_compiling = threading.Lock()


@functools.lru_cache(maxsize=64)
def _compiled(structs: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    """Compiles the program that computes the sums of all leaves in order, on every device."""
    shardings = [struct.sharding for struct in structs]
    meshes = [sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)]
    everywhere = NamedSharding(meshes[0], PartitionSpec()) if meshes else None

    def of_all(leaves: Sequence[jax.Array]) -> jax.Array:
        leaves = jax.device_put(leaves, jax.memory.Space.Device)
        sums = [_sums(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]
        return jnp.concatenate(sums)

    program = jax.jit(of_all, out_shardings=everywhere)
    # JAX uses another int4 layout in programs that are compiled ahead of time.
    is_ahead = all(struct.dtype != jnp.int4 for struct in structs)
    return program.lower(list(structs)).compile() if is_ahead else program


def _sums(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    """Returns the sums of the planes of one leaf: per shard on each device, then over devices."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    shape = leaf.shape
    platform = next(iter(sharding.device_set)).platform
    max_words = _CPU_BLOCK if platform == "cpu" else _DEVICE_BLOCK
    if not isinstance(sharding, NamedSharding):
        return _sums_of_shard(leaf, shape, [0] * leaf.ndim, max_words)
    spec = (*sharding.spec, *[None] * leaf.ndim)[: leaf.ndim]
    axes = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]

    def of_shard(shard: jax.Array) -> jax.Array:
        starts = [
            jax.lax.axis_index(names).astype(jnp.uint32) * np.uint32(size) if names else 0
            for names, size in zip(axes, shard.shape, strict=True)
        ]
        sums = _sums_of_shard(shard, shape, starts, max_words)
        split = tuple(name for names in axes for name in names)
        return jax.lax.psum(sums, split) if split else sums

    whole = PartitionSpec()
    return jax.shard_map(
        of_shard,
        mesh=sharding.mesh,
        in_specs=PartitionSpec(*spec),
        out_specs=whole,
        check_vma=False,
    )(leaf)


def _sums_of_shard(
    shard: jax.Array, shape: tuple[int, ...], starts: Sequence[Index], max_words: int
) -> jax.Array:
    """Returns the sums of the planes of a shard that begins at `starts` of an array of `shape`.

    It processes a block of rows at a time. XLA does not fuse mixing and summing on every device,
    and the mixed words of all rows would take as much memory as the array, or twice as much.
    """
    rows = shard.reshape(-1, *shard.shape[1:][-1:])
    leading = shard.shape[: max(1, shard.ndim - 1)] or (1,)
    step = max(1, min(rows.shape[0], max_words // max(1, math.prod(rows.shape[1:]))))

    def of_block(first: Index, size: int) -> jax.Array:
        position = _first_positions(first, size, leading, shape, starts)
        if rows.ndim == 2:
            column = jnp.arange(rows.shape[1], dtype=jnp.uint32) + _u32(starts[-1])
            position = position[:, None] + column[None, :]
        mixed = position * np.uint32(_POSITION)
        # The cast to bits comes first: on CPUs, XLA slices bfloat16 rows as float32, which copies
        # all rows and changes some NaNs. The barrier keeps the cast in the loop.
        held, start = jax.lax.optimization_barrier((rows, first))
        planes = _planes(jax.lax.dynamic_slice_in_dim(_as_unsigned(held), start, size))
        return jnp.stack([jnp.sum(_finalize(p ^ mixed), dtype=jnp.uint32) for p in planes])

    blocks, rest = divmod(rows.shape[0], step)
    total = of_block(0, step)
    if blocks > 1:
        total = jax.lax.fori_loop(1, blocks, lambda n, sums: sums + of_block(n * step, step), total)
    return total + of_block(blocks * step, rest) if rest else total


def _first_positions(
    first: Index,
    size: int,
    leading: tuple[int, ...],
    shape: tuple[int, ...],
    starts: Sequence[Index],
) -> jax.Array:
    """Returns the flat positions of the first elements of some rows of a shard, modulo 2^32.

    Args:
        first: Index of the first row, counted over all leading dims of the shard.
        size: Number of rows.
        leading: Sizes of the leading dims of the shard.
        shape: Shape of the whole array.
        starts: Start of the shard in the whole array, per dim.
    """
    left = _u32(first) + jnp.arange(size, dtype=jnp.uint32)
    position = jnp.zeros(size, jnp.uint32)
    for dim in reversed(range(min(len(leading), len(shape)))):
        extent = np.uint32(leading[dim])
        index = jax.lax.rem(left, jnp.full(size, extent)) + _u32(starts[dim])
        position = position + index * np.uint32(math.prod(shape[dim + 1 :]) & _WORD)
        left = jax.lax.div(left, jnp.full(size, extent))
    return position


def _u32(number: Index) -> jax.Array:
    return jnp.asarray(number).astype(jnp.uint32)


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def _as_unsigned(array: jax.Array) -> jax.Array:
    """Returns the bits of floats of up to 32 bits, and other arrays unchanged."""
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    unsigned = _UNSIGNED.get(array.dtype.itemsize) if is_float else None
    return array if unsigned is None else jax.lax.bitcast_convert_type(array, unsigned)


def _planes(array: jax.Array) -> list[jax.Array]:
    """Returns the bits of an array as planes of uint32 with the array's shape."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return [*_planes(jnp.real(array)), *_planes(jnp.imag(array))]
    if array.dtype == jnp.bool_:
        return [array.astype(jnp.uint32)]
    if array.dtype == jnp.int4:
        array = array.astype(jnp.int8)
    if array.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return [words[..., 0], words[..., 1]]
    unsigned = _UNSIGNED[array.dtype.itemsize]
    return [jax.lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)]


def _planes_of(leaf: Leaf) -> int:
    return 1 if is_key(leaf) else max(1, leaf.dtype.itemsize // 4)
