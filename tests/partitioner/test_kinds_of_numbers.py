"""Partitioned functions agree with one device on NaN, bits, complex numbers and narrow indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardlib as sl

ALL = ("data", "fsdp", "tensor")


def numbers(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def same(mesh, fn, specs, *args, tolerance=0.0):
    want = jax.jit(fn)(*args)
    with sl.use(mesh, sl.rules.STANDARD):
        got = jax.jit(sl.partitioned(fn, specs))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, x.dtype if x.dtype != jnp.bfloat16 else np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_largest_of_numbers_and_nan_is_nan(mesh, dtype):
    x = numbers(8, 8)
    x[3, 5], x[7, 0], x[2, 2], x[4], x[:, 6] = np.nan, -np.nan, np.inf, -np.inf, -0.0

    def fn(x):
        return jnp.max(x, 0), jnp.min(x, 1), jnp.max(x), jnp.max(-jnp.abs(x), 1), jnp.min(x[:3], 0)

    same(mesh, fn, (P("data", ("fsdp", "tensor")),), jnp.asarray(x, dtype))


def test_terms_that_overflow_are_summed_before_they_grow(mesh):
    x = np.float16([[200], [-150]] * 4)
    same(mesh, lambda x: (jnp.sum(x, 0) * np.float16(300), x[0]), (P(ALL),), x)


def test_float16_terms_are_summed_before_they_are_added(mesh):
    """208 * 160 - 208 * 156, twice: a device has 66,560 or -64,896, and 65,504 is the most."""
    x, w = np.full((8, 2), 208, np.float16), np.float16([[160] * 8, [-156] * 8])

    def fn(x, w):
        carried, _ = lax.scan(lambda c, _: (c + x @ w, None), jnp.zeros((8, 8), x.dtype), length=3)
        rows = lax.reduce_sum_p.bind(x @ w, axes=(1,), out_sharding=None)
        return x @ w + x @ w[:, ::-1], carried, rows

    same(mesh, fn, (P(None, "tensor"), P("tensor")), x, w)


def test_lookups_past_the_end_find_the_last_row(mesh):
    """Also where they promise to stay within the table, as plain indexing does."""
    table, at = numbers(8, 4), jnp.array([0, 7, 8, 20, -1, -30])

    def fn(table, at):
        rows = jax.vmap(lambda row, i: row[i])(table[:6], at)
        return table[at], table.at[at].get(mode="promise_in_bounds"), rows

    for rows in ("data", ALL):
        same(mesh, fn, (P(rows), P()), table, at)


def test_bits_are_drawn_as_where_they_were_asked_for(mesh):
    key = jax.random.key(3)

    def fn(x):
        with jax.threefry_partitionable(False):
            bits = jax.random.bits(key, (8, 8)) >> 9
        return x + bits

    same(mesh, fn, (P("data"),), np.zeros((8, 8), np.uint32))


def test_bits_of_integers_are_joined_by_bits(mesh):
    x = np.random.default_rng(0).integers(-(2**20), 2**20, (8, 8), np.int32) | 0x0FF000

    def fn(x):
        joined = jnp.bitwise_and.reduce(x, 1), jnp.bitwise_or.reduce(x, 0)
        return joined, jnp.bitwise_xor.reduce(x, 0), jnp.max(x, 0), jnp.all(x > 0, 1)

    same(mesh, fn, (P("data", ("fsdp", "tensor")),), x)


def test_complex_numbers(mesh):
    x = numbers(8, 8) + 1j * numbers(8, 8, seed=1)

    def fn(x):
        total, sums = lax.scan(lambda c, row: (c + row @ x, c.sum()), jnp.zeros(8, x.dtype), x)
        return total, sums, jnp.max(x, 0), jnp.min(x, 1), x.imag.sum(0)

    # Sums of 64 terms of size 1, in another order.
    same(mesh, fn, (P("fsdp", ("data", "tensor")),), x, tolerance=64 * 2.0**-22)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_indices_too_narrow_for_where_a_piece_begins(mesh, dtype):
    """A piece of a table of 512 rows may begin at 256, which is 0 in 8 bits."""
    rows = 512 if dtype != np.uint16 else 2**17
    table = numbers(rows, 2)
    at = np.random.default_rng(1).integers(0, min(np.iinfo(dtype).max, rows), (8, 2)).astype(dtype)

    def fn(table, at):
        taken = [jnp.take(table, at, axis=0, mode=mode) for mode in ("clip", "fill")]
        summed = jax.ops.segment_sum(jnp.ones(8), at[:, 0], rows)
        numbers = lax.ScatterDimensionNumbers((2,), (0,), (0,))
        added = lax.scatter_add(table, at[..., None], jnp.ones((8, 2, 2)), numbers, mode="drop")
        return taken, summed, added, lax.dynamic_slice(table, (at[0, 0], at[0, 1]), (64, 2))

    same(mesh, fn, (P(ALL), P("data")), table, at)


def test_rows_of_a_loop_end_alone(mesh):
    def row(x, w, most):
        def goes_on(state):
            return (state[0].sum() < 9) & (state[1] < most)

        return lax.while_loop(goes_on, lambda s: (jnp.abs(s[0] @ w) + x, s[1] + 1), (x, 0))

    def fn(x, w, most):
        return jax.vmap(row, (0, None, 0))(x, w, most)

    args = np.abs(numbers(8, 8)), numbers(8, 8) / 4, np.arange(8, dtype=np.int32)
    assert len(set(np.asarray(fn(*args)[1]))) > 2
    specs = P("data", "tensor"), P("fsdp", "tensor"), P("fsdp")
    # Eight products of 8 terms, chained.
    same(mesh, fn, specs, *args, tolerance=64 * 2.0**-22)


def test_one_number_as_the_bits_of_several(mesh):
    def fn(x):
        return lax.bitcast_convert_type(x[0], jnp.uint8), lax.bitcast_convert_type(x, jnp.uint8)

    with sl.use(mesh, sl.rules.STANDARD):
        got = jax.jit(sl.partitioned(fn, (P("data"),), (P(("data", "tensor")), P())))(numbers(8))
    for a, b in zip(got, fn(jnp.asarray(numbers(8))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_products_of_booleans_say_whether_any_pair_holds(mesh):
    x = np.random.default_rng(0).random((8, 8)) < 0.6

    def fn(x):
        both = x @ x.T
        return both, ~both, both.astype(np.float32) * 3, jnp.any(both, 0)

    same(mesh, fn, (P(None, ("data", "fsdp")),), x)


def test_sums_are_taken_before_another_16_bit_dtype_overflows_or_rounds(mesh):
    x = jnp.asarray([[70_000], [-70_000]] * 4, jnp.bfloat16)
    same(mesh, lambda x: jnp.sum(x, 0).astype(jnp.float16), (P(ALL),), x)
