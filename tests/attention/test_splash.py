"""The splash kernel: interpreted here, and compiled ahead of time where libtpu is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.attention.mask import Mask, places
from shardlib.attention.plain import plain
from shardlib.attention.splash import splash

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
        y = plain(*arrays, mask.pairs(at, at))
        return jnp.sum(y * weights), y

    found, wanted = (jax.jit(jax.grad(f, has_aux=True))(arrays) for f in (fast, slow))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=ATOL)


AHEAD_OF_TIME = """
import json, sys
from jax.experimental import topologies
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
import shardlib as sl
from shardlib.attention import attend

topology, shape, names, options = json.loads(sys.argv[1])
devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
mesh = Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))

def loss(query, key, value, ids):
    with sl.use(mesh, sl.rules.STANDARD):
        return jnp.sum(attend(query, key, value, segment_ids=ids, **options).astype(jnp.float32))

placed = NamedSharding(mesh, P(*(n if n in names else None for n in ("data", "context", "tensor"))))
rows = NamedSharding(mesh, P(*placed.spec[:2]))
arrays = [jax.ShapeDtypeStruct((4, 2048, n, 128), jnp.bfloat16, sharding=placed) for n in (8, 4, 4)]
ids = jax.ShapeDtypeStruct((4, 2048), jnp.int32, sharding=rows)
text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays, ids).compile().as_text()
kinds = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
print(json.dumps([text.count("tpu_custom_call"), [k for k in kinds if f" {k}" in text]]))
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
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
def test_compiles_for_tpus(topology, shape, names, options, kernels, sent):
    """A kernel forward and two backward; each device computes its own rows and heads."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-16",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_OPTIMIZATION_LEVEL": "O0",
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME, json.dumps([topology, shape, names, options])],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [kernels, sent]
