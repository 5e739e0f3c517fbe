"""Attention shared by the devices along `context` against one device's: values and gradients."""

import functools
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.nn import remat
from shardlib.nn.attention import attend, tiles, unzigzag, zigzag
from shardlib.nn.attention.gather import gathered_attention
from shardlib.nn.attention.mask import Mask
from shardlib.nn.attention.region import in_region
from shardlib.nn.attention.ring import ring_attention
from shardlib.sharding.manual import manual

BATCH, LENGTH, HEADS, DIM = 2, 32, 8, 8

# Terms of size about 1, each rounded to 2**-24 and added in another order: over 32 keys for the
# output, over 32 queries times 4 heads of a group at least for the gradients.
ATOL, GRADIENT_ATOL = 32 * 2**-24, 128 * 2**-24

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
    monkeypatch.setattr(tiles, "MAX_TILE", 2)
    monkeypatch.setattr(tiles, "_MIN_TILE", 2)


@functools.cache
def inputs(kv_heads):
    """Returns query, key, value and weights for the output."""
    keys = jax.random.split(jax.random.key(kv_heads), 4)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    draw = lambda key, n: np.asarray(jax.random.normal(key, (BATCH, LENGTH, n, DIM)))  # noqa: E731
    return tuple(map(draw, keys, heads))


@functools.cache
def expected(variant, kv_heads):
    """Returns output and gradients of one device with the plain backend."""
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
        atol = ATOL if name == "output" else GRADIENT_ATOL
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)


CASES = [
    # mesh, method, order, variant, kv_heads
    ("context=8", "ring", "zigzag", "causal", 2),
    ("context=8", "ring", "zigzag", "packed", 8),
    ("context=8", "ring", "contiguous", "packed window", 1),
    ("context=8", "gather", "zigzag", "packed", 2),
    ("context=8", "ulysses", "contiguous", "packed", 2),
    ("context=8", "ulysses", "contiguous", "causal", 1),
    ("context=8", "ulysses", "zigzag", "packed window", 8),
    ("data=2,context=2,tensor=2", "ring", "zigzag", "packed", 4),
    ("data=2,context=2,tensor=2", "ring", "contiguous", "both ways", 1),
    ("data=2,context=2,tensor=2", "gather", "contiguous", "window", 2),
    ("data=2,context=2,tensor=2", "ulysses", "contiguous", "packed", 2),
    ("context=4,tensor=2", "ring", "zigzag", "packed window", 2),
    ("context=4,tensor=2", "ring", "contiguous", "causal", 1),
    ("context=4,tensor=2", "gather", "zigzag", "packed window", 1),
    ("context=4,tensor=2", "gather", "contiguous", "both ways", 4),
    ("context=4,tensor=2", "ulysses", "contiguous", "both ways", 4),
    ("context=2,tensor=4", "ring", "zigzag", "causal", 2),
    ("context=2,tensor=4", "ulysses", "contiguous", "window", 2),
    ("stage=2,data=2,context=2", "gather", "zigzag", "packed", 2),
    ("fsdp=2,context=4", "ring", "contiguous", "window", 4),
]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(("mesh", "method", "order", "variant", "kv_heads"), CASES)
def test_equals_one_device(mesh, method, order, variant, kv_heads):
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        run = graded(order, context=method, **VARIANTS[variant])
        found = jax.jit(run)(*inputs(kv_heads))
    assert_same(found, expected(variant, kv_heads))


@pytest.mark.mesh
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses"])
def test_inside_of_a_region_over_another_axis(method):
    """As under a reduction over `data` that is done by hand."""
    order = "contiguous" if method == "ulysses" else "zigzag"

    def region(*arrays):
        rows = jnp.asarray(SEGMENTS)[jax.lax.axis_index("data")][None]
        return graded(order, context=method, segment_ids=rows)(*arrays)

    with sl.use(sl.make_mesh("data=2,context=2,tensor=2"), sl.rules.STANDARD):
        rows = P("data")
        found = jax.jit(manual(region, ("data",), (rows,) * 4, (rows,) * 4))(*inputs(4))
    assert_same(found, expected("packed", 4))


@pytest.mark.parametrize("shared", [ring_attention, gathered_attention])
def test_help_shows_the_arguments_of_shared_attention(shared):
    assert "segments: [batch, length] int32 of queries and of keys" in pydoc.render_doc(shared)


def test_a_ring_inside_of_a_region_over_stages():
    """Each stage runs a ring of its own, on rows of its own."""
    ring = functools.partial(ring_attention, mask=Mask(), order="contiguous")

    def loss(arrays, weights):
        y = in_region(ring, *arrays, (None, None), over_context=True)
        return jnp.sum(y * weights), y

    def region(query, key, value, weights):
        grads, y = jax.grad(loss, has_aux=True)((query, key, value), weights)
        return y, *grads

    with sl.use(sl.make_mesh("stage=2,context=2,tensor=2"), sl.rules.STANDARD):
        rows = P("stage")
        found = jax.jit(manual(region, ("stage",), (rows,) * 4, (rows,) * 4))(*inputs(2))
    assert_same(found, expected("causal", 2))


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_one_pipeline_stage_computes_while_another_idles(method):
    order = "zigzag" if method == "gather" else "contiguous"

    def idle(*arrays):
        return tuple(map(jnp.zeros_like, (arrays[0], *arrays[:3])))

    def region(*arrays):
        works = jax.lax.axis_index("stage") == 0
        return jax.lax.cond(works, graded(order, context=method), idle, *arrays)

    with sl.use(sl.make_mesh("stage=2,context=2,tensor=2"), sl.rules.STANDARD):
        rows = P("stage")
        found = jax.jit(manual(region, ("stage",), (rows,) * 4, (rows,) * 4))(*inputs(2))
    assert_same([x[:1] for x in found], [x[:1] for x in expected("causal", 2)])
    assert not any(np.any(x[1:]) for x in found)


@pytest.mark.mesh
def test_gradients_of_replicated_key_value_heads_under_remat():
    """Recomputed under `full`; under `save:attended` and `dots` the forward ring does not run
    again."""

    def hops(policy):
        def loss(*arrays):
            return jnp.sum(remat.apply(policy, functools.partial(attend, context="ring"))(*arrays))

        with sl.use(sl.make_mesh("context=4,tensor=2"), sl.rules.STANDARD):
            traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*inputs(1)[:3])
            return count_hops(traced.jaxpr.jaxpr), traced.lower().compile()(*inputs(1)[:3])

    counts, gradients = zip(*map(hops, ("none", "save:attended", "dots", "full")), strict=True)
    # Keys and values: 3 hops forward and 3 backward; their gradients 4.
    assert counts == (2 * 10, 2 * 10, 2 * 10, 2 * 13)
    for found in gradients[1:]:
        for x, y in zip(gradients[0], found, strict=True):
            np.testing.assert_allclose(y, x, rtol=0, atol=GRADIENT_ATOL)


def count_hops(jaxpr, times=1):
    """Returns how often a program calls `ppermute`, loops counted as often as they run."""
    count = 0
    for eqn in jaxpr.eqns:
        here = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        count += here * (eqn.primitive.name == "ppermute")
        for inner in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(inner):
                count += count_hops(getattr(inner, "jaxpr", inner), here)
    return count


def is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")
