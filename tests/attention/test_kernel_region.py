"""The region around a kernel that cannot be partitioned, inside of regions over other axes.

Back ends that run anywhere stand in for the kernels: one with a gradient of its own, as the kernels
have, and one that JAX differentiates.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.nn.attention.blockwise import blockwise
from shardlib.nn.attention.mask import Mask, places
from shardlib.nn.attention.plain import plain
from shardlib.nn.attention.region import in_region
from shardlib.sharding.constrain import manual_axes
from shardlib.sharding.manual import manual

BATCH, LENGTH, HEADS, HEAD_DIM = 16, 12, 4, 8
MASK = Mask(window=7)

# Sums over at most 12 keys, or 12 queries of 4 heads, of terms of size about 1, each rounded once
# or twice to 2**-24 and added in another order, with room for the exponentials.
ATOL = 1e-5


def plainly(query, key, value, segments, sinks):
    at, kv_at = (
        places(x.shape[1], None, ids) for x, ids in zip((query, key), segments, strict=True)
    )
    return plain(query, key, value, MASK.pairs(at, kv_at), MASK, sinks)


KERNELS = {"blockwise": functools.partial(blockwise, mask=MASK), "plain": plainly}


def example(kv_heads, packed):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(BATCH, LENGTH, n, HEAD_DIM) for n in (HEADS, kv_heads, kv_heads, HEADS)]
    *arrays, weights = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    ids = jnp.asarray(np.arange(LENGTH)[None] // 5 + np.arange(BATCH)[:, None], jnp.int32)
    return tuple(arrays), weights, ids if packed else None


MESHES = [
    ("data=2,fsdp=2,tensor=2", (), 2, True),
    ("stage=2,data=2,tensor=2", ("stage",), 2, True),
    ("stage=2,fsdp=2,tensor=2", ("stage",), 1, False),
    ("data=2,fsdp=2,tensor=2", ("data",), 1, True),
    ("stage=2,data=2,fsdp=2", ("stage", "data"), 4, True),
    # Axes over which nothing is split, by the rules or because they have one device.
    ("stage=2,data=2,context=2", ("stage",), 2, True),
    ("data=8,tensor=1", ("data",), 2, False),
    ("stage=4,data=2", ("stage", "data"), 2, True),
]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("differentiated", ["inside", "outside"])
@pytest.mark.parametrize(("mesh", "around", "kv_heads", "packed"), MESHES)
def test_values_and_gradients_are_those_of_one_device(
    mesh, around, kv_heads, packed, differentiated, kernel
):
    arrays, weights, ids = example(kv_heads, packed)
    met = []

    def local(query, key, value, segments, sinks):
        met.append((set(manual_axes()), query.shape[0], query.shape[2]))
        return KERNELS[kernel](query, key, value, segments, sinks)

    def attended(arrays, ids):
        return in_region(local, *arrays, (ids, ids), over_context=False, whole_mesh=True)

    def gradients(attended):
        def loss(arrays, weights, ids):
            y = attended(arrays, ids)
            return jnp.sum(y * weights), y

        return jax.grad(loss, has_aux=True)

    def on_mesh(arrays, weights, ids):
        with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
            rows = P(around)
            if not around:
                return gradients(attended)(arrays, weights, ids)
            # A stage of a pipeline differentiates its own part, a loss in chunks is differentiated
            # as a whole.
            if differentiated == "inside":
                part = gradients(attended)
                return manual(part, around, (rows, rows, rows), rows)(arrays, weights, ids)
            part = manual(attended, around, (rows, rows), rows)
            return gradients(part)(arrays, weights, ids)

    found = jax.jit(on_mesh)(arrays, weights, ids)
    axes, *shape = met[0]
    wanted = jax.jit(gradients(attended))(arrays, weights, ids)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=ATOL)

    sizes = sl.make_mesh(mesh).shape
    split = [sizes.get(name, 1) for name in {*around, "data", "fsdp"}]
    assert axes == set(sizes)
    assert shape == [BATCH // math.prod(split), HEADS // sizes.get("tensor", 1)]
