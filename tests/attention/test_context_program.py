"""What the compiled programs of shared attention send and hold, and how even their work is."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.nn.attention import attend, scores_per_device, tiles
from shardlib.nn.attention.mask import Mask

COLLECTIVE = re.compile(
    r"= .*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def compiled(mesh, length, *, heads=(8, 4, 4), segments=False, grad=True, **options):
    """Returns the text of attention and its gradients with inputs split as the rules say."""

    def loss(query, key, value, ids):
        with sl.use(mesh, sl.rules.STANDARD):
            return jnp.sum(attend(query, key, value, segment_ids=ids, **options))

    axes = ("data", "context", "tensor")
    spec = P(*(name if name in mesh.axis_names else None for name in axes))
    placed = NamedSharding(mesh, spec)
    arrays = [jax.ShapeDtypeStruct((2, length, n, 8), jnp.float32, sharding=placed) for n in heads]
    rows = NamedSharding(mesh, P(*spec[:2]))
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32, sharding=rows) if segments else None
    run = jax.grad(loss, argnums=(0, 1, 2)) if grad else loss
    shardings = (placed,) * 3 if grad else None
    return jax.jit(run, out_shardings=shardings).lower(*arrays, ids).compile().as_text()


@pytest.mark.rest("mesh", keep=2)
@pytest.mark.parametrize(
    ("method", "order", "kinds"),
    [
        ("ring", "zigzag", {"collective-permute"}),
        ("ring", "contiguous", {"collective-permute"}),
        ("gather", "zigzag", {"all-gather", "reduce-scatter"}),
        # The all-gather is of segment ids.
        ("ulysses", "contiguous", {"all-to-all", "all-gather"}),
    ],
)
def test_a_method_sends_by_its_own_collectives_only(method, order, kinds):
    mesh = sl.make_mesh("data=2,context=2,tensor=2")
    text = compiled(mesh, 32, segments=True, context=method, order=order)
    assert set(COLLECTIVE.findall(text)) == kinds


@pytest.mark.mesh
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_segments_travel_with_the_keys_of_each_layer(order):
    """A ring of segments outside of the layers would run beside those of keys, which XLA for CPU
    does not keep apart."""
    mesh = sl.make_mesh("context=8")

    def layer(x, _, ids):
        return attend(x, x, x, segment_ids=ids, context="ring", order=order), None

    def loss(x, ids):
        with sl.use(mesh, sl.rules.STANDARD):
            x, _ = jax.lax.scan(jax.checkpoint(functools.partial(layer, ids=ids)), x, length=3)
        return jnp.sum(x)

    rows = NamedSharding(mesh, P(None, "context"))
    x = jax.ShapeDtypeStruct((1, 32, 1, 8), jnp.float32, sharding=rows)
    ids = jax.ShapeDtypeStruct((1, 32), jnp.int32, sharding=rows)
    text = jax.jit(jax.grad(loss), out_shardings=rows).lower(x, ids).compile().as_text()
    bodies = [body for body in text.split("\n}\n") if "collective-permute" in body]
    dtypes = [set(re.findall(r"= (\w+)\[[^=]*? collective-permute", body)) for body in bodies]
    assert {"f32", "s32"} in dtypes
    assert {"s32"} not in dtypes


def test_blockwise_on_a_mesh_sends_nothing():
    mesh = sl.make_mesh("data=2,tensor=4")
    assert not COLLECTIVE.findall(compiled(mesh, 32, segments=True, backend="blockwise"))


def wide_buffers(text, size):
    """Returns the shapes of a program that have two dims of `size` or more."""
    shapes = set(re.findall(r"[a-z]+\d+\[([\d,]+)\]", text))
    return {s for s in shapes if sum(int(n) >= size for n in s.split(",")) >= 2}


@pytest.mark.mesh
@pytest.mark.parametrize("method", ["ring", "gather", "ulysses", None])
def test_nothing_is_quadratic_in_the_length(method, monkeypatch):
    monkeypatch.setattr(tiles, "MAX_TILE", 16)
    monkeypatch.setattr(tiles, "_MIN_TILE", 16)
    if method is None:
        mesh, length, shard = sl.make_mesh("data=2", devices=jax.devices()[:2]), 256, 256
        options = {"backend": "blockwise"}
        assert wide_buffers(compiled(mesh, length, backend="xla"), shard)
    else:
        mesh, length, shard = sl.make_mesh("context=8"), 1024, 128
        order = "contiguous" if method == "ulysses" else "zigzag"
        options = {"backend": "blockwise", "context": method, "order": order}
    assert not wide_buffers(compiled(mesh, length, heads=(8, 8, 8), **options), shard)


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_zigzag_makes_every_step_of_a_ring_even(shards):
    length = 64 * shards
    found = np.array(scores_per_device(length, shards, "zigzag"))
    here = length // shards
    # Three of four quarters at a device's own keys: the tiles on the diagonal are computed whole.
    np.testing.assert_array_equal(found[:, 0], 3 * here**2 // 4)
    np.testing.assert_array_equal(found[:, 1:], here**2 // 2)


def test_zigzag_work_is_what_causality_asks_for(monkeypatch):
    """Down to tiles of one position, the scores computed are the visible pairs."""
    monkeypatch.setattr(tiles, "MAX_TILE", 1)
    monkeypatch.setattr(tiles, "_MIN_TILE", 1)
    for order, even in (("zigzag", True), ("contiguous", False)):
        totals = np.sum(scores_per_device(32, 4, order), axis=1)
        assert totals.sum() == 32 * 33 // 2
        assert (totals.max() == totals.min()) == even
    windowed = scores_per_device(32, 4, "contiguous", window=5)
    # Each query sees 5, the first four fewer; one hop suffices, since a shard is longer.
    assert np.sum(windowed) == 32 * 5 - 10
    assert np.shape(windowed) == (4, 2)


@pytest.mark.mesh
def test_the_compiled_loop_visits_what_is_counted(monkeypatch):
    """The tiles that a shard's own attention visits, at run time, are those of the count."""
    monkeypatch.setattr(tiles, "MAX_TILE", 4)
    monkeypatch.setattr(tiles, "_MIN_TILE", 4)
    visited = []
    seen = Mask.tiles

    def record(self, queries, keys):
        found = jnp.asarray(seen(self, queries, keys))
        shard = jax.lax.axis_index("context")
        jax.debug.callback(lambda i, n: visited.append((int(i), int(n))), shard, found.sum())
        return found

    monkeypatch.setattr(Mask, "tiles", record)
    mesh = sl.make_mesh("context=4", devices=jax.devices()[:4])
    arrays = [jnp.ones((1, 64, 4, 8))] * 3
    with sl.use(mesh, sl.rules.STANDARD):
        run = functools.partial(attend, context="ring", order="zigzag")
        jax.block_until_ready(jax.jit(run)(*arrays))
    jax.effects_barrier()
    monkeypatch.undo()
    monkeypatch.setattr(tiles, "MAX_TILE", 4)
    monkeypatch.setattr(tiles, "_MIN_TILE", 4)
    counted = scores_per_device(64, 4, "zigzag")
    for device, steps in enumerate(counted):
        mine = sorted(n * 16 for i, n in visited if i == device)
        assert mine == sorted(steps)


def test_a_row_that_does_not_divide_cannot_be_counted():
    with pytest.raises(ModelError, match=r"a row of 30 positions .*\n  Use a length"):
        scores_per_device(30, 4, "zigzag")
