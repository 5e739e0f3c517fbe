"""The splash kernel: interpreted here, and compiled ahead of time where libtpu is installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.nn.attention import attend
from shardlib.nn.attention.mask import Mask, places
from shardlib.nn.attention.plain import plain
from shardlib.nn.attention.splash import splash

pytestmark = pytest.mark.aot

LENGTH = 256

# Sums over at most 256 keys, or 256 queries of 2 heads, of terms of size about 1, each rounded once
# or twice to 2**-24 and added in another order, with room for the exponentials.
ATOL = 5e-5


@pytest.mark.parametrize(
    ("mask", "packed"), [(Mask(), False), (Mask(window=70), True), (Mask(causal=False), True)]
)
def test_equals_the_plain_way(mask, packed):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(1, LENGTH, n, 64) for n in (2, 1, 1, 2)]
    *arrays, weights = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))
    ids = jnp.asarray(np.repeat([1, 2, 0], [100, 120, 36])[None], jnp.int32) if packed else None

    def fast(arrays):
        y = splash(*arrays, (ids, ids), mask=mask, interpret=True)
        return jnp.sum(y * weights), y

    def slow(arrays):
        at = places(LENGTH, None, ids)
        y = plain(*arrays, mask.pairs(at, at), mask)
        return jnp.sum(y * weights), y

    found, wanted = (jax.jit(jax.grad(f, has_aux=True))(arrays) for f in (fast, slow))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=ATOL)


@pytest.mark.parametrize(
    ("topology", "shape", "names", "options", "kernels", "sent"),
    [
        ("v5p:2x2x1", (2, 2), ("data", "tensor"), {}, 3, []),
        ("v5p:2x2x1", (2, 2), ("data", "tensor"), {"window": 512}, 3, []),
        (
            "v6e:2x4",
            (2, 2, 2),
            ("data", "context", "tensor"),
            {"context": "ulysses"},
            3,
            ["all-gather", "all-to-all"],
        ),
        (
            "v6e:2x4",
            (2, 2, 2),
            ("data", "context", "tensor"),
            {"order": "zigzag"},
            0,
            ["collective-permute"],
        ),
    ],
)
def test_compiles_for_tpus(topology, shape, names, options, kernels, sent, tpu_devices):
    """A kernel forward and two backward; each device computes its own rows and heads."""
    devices = np.array(tpu_devices(topology)).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))

    def loss(query, key, value, ids):
        with sl.use(mesh, sl.rules.STANDARD):
            y = attend(query, key, value, segment_ids=ids, **options)
        return jnp.sum(y.astype(jnp.float32))

    axes = [name if name in names else None for name in ("data", "context", "tensor")]
    placed, rows = NamedSharding(mesh, P(*axes)), NamedSharding(mesh, P(*axes[:2]))
    arrays = [
        jax.ShapeDtypeStruct((4, 2048, heads, 128), jnp.bfloat16, sharding=placed)
        for heads in (8, 4, 4)
    ]
    ids = jax.ShapeDtypeStruct((4, 2048), jnp.int32, sharding=rows)
    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, ids).compile().as_text()
    kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    assert text.count("tpu_custom_call") == kernels
    assert [kind for kind in kinds if f" {kind}" in text] == sent
