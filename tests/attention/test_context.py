"""Attention shared by the devices along `context` against one device's: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.attention import attend, sight, unzigzag, zigzag
from shardlib.errors import ModelError
from shardlib.manual import manual

BATCH, LENGTH, HEADS, DIM = 2, 32, 8, 8

# Sums over at most 32 keys, or 32 queries times 4 heads of a group, of terms of size about 1, each
# rounded once or twice to 2**-24 and added in another order: 128 * 2**-24, with room for the
# exponentials.
ATOL = 2e-5

# Two documents and padding, whose borders are at no shard's border; all of one document.
SEGMENTS = np.stack([np.repeat([1, 2, 0], [13, 14, 5]), np.ones(LENGTH, int)]).astype(np.int32)

VARIANTS = {
    "causal": {},
    "packed": {"segment_ids": SEGMENTS},
    "window": {"window": 7},
    "packed window": {"segment_ids": SEGMENTS, "window": 10},
    "both ways": {"causal": False, "segment_ids": SEGMENTS},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles smaller than a chunk, so that many are met and skipped."""
    monkeypatch.setattr(sight, "MAX_TILE", 2)
    monkeypatch.setattr(sight, "_MIN_TILE", 2)


@functools.cache
def inputs(kv_heads):
    """Returns query, key, value and weights for the output."""
    keys = jax.random.split(jax.random.key(kv_heads), 4)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    draw = lambda key, n: np.asarray(jax.random.normal(key, (BATCH, LENGTH, n, DIM)))  # noqa: E731
    return tuple(map(draw, keys, heads))


@functools.cache
def expected(variant, kv_heads):
    """Returns output and gradients of one device with the plain back end."""
    return jax.jit(graded(backend="xla", **VARIANTS[variant]))(*inputs(kv_heads))


def graded(order="contiguous", segment_ids=None, **options):
    """Returns a function of query, key, value and weights that gives output and gradients."""

    def loss(arrays, weights, segment_ids):
        y = attend(*arrays, segment_ids=segment_ids, order=order, **options)
        return jnp.sum(y * weights), y

    def run(query, key, value, weights):
        ids = None if segment_ids is None else jnp.asarray(segment_ids)
        arrays = (query, key, value)
        if order == "zigzag":
            arrays, weights, ids = jax.tree.map(zigzag, (arrays, weights, ids))
        names = ("batch", "length", "heads", "head_dim")
        query, weights = (sl.constrain(x, *names) for x in (arrays[0], weights))
        names = ("batch", "length", "kv_heads", "head_dim")
        key, value = (sl.constrain(x, *names) for x in arrays[1:])
        grads, y = jax.grad(loss, has_aux=True)((query, key, value), weights, ids)
        found = (y, *grads)
        return tuple(map(unzigzag, found)) if order == "zigzag" else found

    return run


def assert_same(found, wanted):
    for name, x, y in zip(("output", "query", "key", "value"), found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=ATOL, err_msg=name)


CASES = [
    # mesh, method, order, variant, kv_heads
    ("context=8", "ring", "zigzag", "causal", 2),
    ("context=8", "ring", "zigzag", "packed", 8),
    ("context=8", "ring", "contiguous", "packed window", 1),
    ("context=8", "gather", "zigzag", "packed", 2),
    ("context=8", "ulysses", "contiguous", "packed", 2),
    ("context=8", "ulysses", "zigzag", "packed window", 8),
    ("data=2,context=2,tensor=2", "ring", "zigzag", "packed", 4),
    ("data=2,context=2,tensor=2", "ring", "contiguous", "both ways", 1),
    ("data=2,context=2,tensor=2", "gather", "contiguous", "window", 2),
    ("data=2,context=2,tensor=2", "ulysses", "contiguous", "packed", 2),
    ("context=4,tensor=2", "ring", "zigzag", "packed window", 2),
    ("context=4,tensor=2", "ring", "contiguous", "causal", 1),
    ("context=4,tensor=2", "gather", "zigzag", "packed window", 1),
    ("context=4,tensor=2", "ulysses", "contiguous", "both ways", 4),
    ("context=2,tensor=4", "ring", "zigzag", "causal", 2),
    ("context=2,tensor=4", "ulysses", "contiguous", "window", 2),
    ("stage=2,data=2,context=2", "gather", "zigzag", "packed", 2),
    ("fsdp=2,context=4", "ring", "contiguous", "window", 4),
]


@pytest.mark.parametrize(("mesh", "method", "order", "variant", "kv_heads"), CASES)
def test_equals_one_device(mesh, method, order, variant, kv_heads):
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        run = graded(order, context=method, **VARIANTS[variant])
        found = jax.jit(run)(*inputs(kv_heads))
    assert_same(found, expected(variant, kv_heads))
