"""Attention by tiles against the plain one, on one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib as sl
from shardlib.nn.attention import attend, tiles
from shardlib.nn.attention.mask import Mask, cut_places, places
from shardlib.nn.attention.order import row_positions
from shardlib.nn.attention.tiles import tile_size

BATCH, LENGTH, HEADS, DIM = 2, 24, 4, 8

# Sums over at most 24 keys, or 24 queries of 4 heads, of terms of size about 1, each rounded once
# or twice to 2**-24 and added in another order, with room for the exponentials.
ATOL = 1e-5

SEGMENTS = np.stack([np.repeat([1, 2, 0], [9, 11, 4]), np.repeat([1, 2], 12)]).astype(np.int32)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "MAX_TILE", 4)
    monkeypatch.setattr(tiles, "_MIN_TILE", 2)


def example(kv_heads=2, kv_length=LENGTH, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(kv_heads), 4)
    shapes = [(LENGTH, HEADS), (kv_length, kv_heads), (kv_length, kv_heads), (LENGTH, HEADS)]
    return [
        jax.random.normal(key, (BATCH, *shape, DIM), dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def graded(backend, **options):
    def loss(arrays, weights):
        y = attend(*arrays, backend=backend, **options)
        return jnp.sum((y * weights).astype(jnp.float32)), y

    def run(*arrays):
        grads, y = jax.grad(loss, has_aux=True)(arrays[:3], arrays[3])
        return y, *grads

    return jax.jit(run)


@pytest.mark.mesh
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 5},
        {"segment_ids": SEGMENTS},
        {"segment_ids": SEGMENTS, "causal": False},
        {"segment_ids": SEGMENTS, "window": 6},
    ],
    ids=["causal", "full", "window", "packed", "packed full", "packed window"],
)
def test_equals_the_plain_way(kv_heads, options):
    arrays = example(kv_heads)
    found, wanted = (graded(name, **options)(*arrays) for name in ("blockwise", "xla"))
    for name, x, y in zip(("output", "query", "key", "value"), found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=ATOL, err_msg=name)


@pytest.mark.parametrize("causal", [True, False])
def test_keys_of_another_length(causal):
    arrays = example(kv_length=36)
    found, wanted = (graded(name, causal=causal)(*arrays) for name in ("blockwise", "xla"))
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=ATOL)


def test_bfloat16_in_and_out_with_float32_sums():
    arrays = example(dtype=jnp.bfloat16)
    exact = graded("xla")(*(x.astype(jnp.float32) for x in arrays))
    for x, y in zip(graded("blockwise")(*arrays), exact, strict=True):
        assert x.dtype == jnp.bfloat16
        # Weights, results and the cotangents of scores are each rounded to 8 bits of mantissa.
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=3 * 2**-8 * np.max(np.abs(y)))


def test_a_query_that_sees_nothing_gives_zero():
    query, key, value, _ = example()
    ids = jnp.ones((BATCH, LENGTH), jnp.int32)
    other = ids.at[:, 4:].set(2)

    def total(arrays):
        y = attend(*arrays, segment_ids=other, kv_segment_ids=ids, backend="blockwise")
        return jnp.sum(y**2), y

    grads, y = jax.jit(jax.grad(total, has_aux=True))((query, key, value))
    assert jnp.all(y[:, 4:] == 0)
    assert jnp.all(y[:, :4] != 0)
    assert jnp.all(grads[0][:, 4:] == 0)
    assert all(jnp.all(jnp.isfinite(g)) for g in grads)


def test_a_large_score_does_not_overflow():
    query, key, value, _ = example()
    arrays = 100 * query, 100 * key, value
    found, wanted = (
        jax.jit(functools.partial(attend, backend=name))(*arrays) for name in ("blockwise", "xla")
    )
    np.testing.assert_allclose(found, wanted, atol=ATOL)


def test_on_a_mesh_each_device_has_its_own_rows_and_heads():
    arrays = example(kv_heads=2)
    mesh = sl.make_mesh("data=2,tensor=4")
    with sl.use(mesh, sl.rules.STANDARD):
        found = graded("blockwise", segment_ids=jnp.asarray(SEGMENTS))(*arrays)
    wanted = graded("xla", segment_ids=SEGMENTS)(*arrays)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=ATOL)


@pytest.mark.parametrize(
    ("mask", "ids", "count"),
    [
        # Of 6 x 6 tiles: the triangle with its diagonal; a band; two documents of three tiles.
        (Mask(), None, 21),
        (Mask(window=4), None, 11),
        (Mask(window=5), None, 11),
        (Mask(window=6), None, 15),
        (Mask(causal=False), np.repeat([[1, 2]], 12, axis=1), 18),
        (Mask(), np.repeat([[1, 2]], 12, axis=1), 12),
        (Mask(causal=False), None, 36),
    ],
)
def test_hidden_tiles_are_not_visited(mask, ids, count):
    at = cut_places(places(24, None, ids), 4)
    visited = mask.tiles(at, at)
    assert isinstance(visited, np.ndarray)
    assert visited.sum() == count


def test_no_visible_pair_is_in_a_hidden_tile():
    rng = np.random.default_rng(0)
    in_order, shuffled = np.arange(24), rng.permutation(24)
    chunks = np.concatenate([row_positions("zigzag", i, 3, 8)[0] for i in range(3)])
    packed, scattered = SEGMENTS, rng.integers(0, 3, (2, 24)).astype(np.int32)
    hidden = 0
    for row, ids in itertools.product((in_order, chunks, shuffled), (None, packed, scattered)):
        where = places(24, row.astype(np.int32)[None], ids)
        at = cut_places(where, 4)
        for mask in (Mask(), Mask(window=3), Mask(causal=False)):
            visited = mask.tiles(at, at)
            visible = mask.pairs(where, where)
            if visible is not None:
                seen = np.asarray(visible).any(axis=0).reshape(6, 4, 6, 4).any(axis=(1, 3))
                assert np.all(visited | ~seen)
            if row is chunks and mask.window:
                np.testing.assert_array_equal(jax.jit(mask.tiles)(at, at), visited)
            hidden += np.sum(~visited)
    assert hidden > 100


def test_a_tile_is_the_largest_divisor_of_a_sensible_size(monkeypatch):
    monkeypatch.undo()
    assert [tile_size(n) for n in (7, 512, 513, 1024, 1000, 8192, 1031)] == [
        7, 512, 171, 512, 500, 512, None,
    ]  # fmt: skip
