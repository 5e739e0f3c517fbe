"""Regions that handle mesh axes by hand, and `constrain` inside of them."""

import contextvars

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.errors import MeshError, RuleError
from shardlib.sharding.manual import axis_size, gather_parts, manual, sum_to_parts, summed_columns

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture(autouse=True)
def scope():
    with sl.use(sl.make_mesh("stage=2,data=2,tensor=2"), sl.rules.STANDARD) as scope:
        yield scope


def test_a_region_sees_one_shard_of_its_axes_and_leaves_the_others():
    seen = []

    def region(x):
        seen.append((x.shape, axis_size("stage"), axis_size("data"), axis_size("context")))
        return jax.lax.psum(sl.constrain(x, "batch", "mlp"), "stage")

    y = jax.jit(manual(region, ("stage",), P("stage"), P()))(X)
    assert seen == [((4, 8), 1, 2, 1)]
    np.testing.assert_array_equal(y, X[:4] + X[4:])


def test_regions_nest_and_differentiate():
    def inner(x):
        assert (axis_size("stage"), axis_size("data"), axis_size("tensor")) == (1, 1, 2)
        return jax.lax.psum(jnp.sum(sl.constrain(x, None, "mlp") ** 2), "data")

    def outer(x):
        return jax.lax.psum(manual(inner, ("data",), P("data"), P())(x), "stage")

    total, grad = jax.jit(jax.value_and_grad(manual(outer, ("stage",), P("stage"), P())))(X)
    assert float(total) == np.sum(X**2)
    np.testing.assert_array_equal(grad, 2 * X)


@pytest.mark.parametrize("n", [8, 4, 3, 1])
def test_a_sum_in_two_hops_gives_each_device_its_part(n):
    mesh = sl.make_mesh(f"fsdp={n}", devices=jax.devices()[:n])
    rows = np.arange(n * 24, dtype=np.float32).reshape(n, 24)
    with sl.use(mesh, sl.rules.STANDARD):
        summed = manual(lambda x: sum_to_parts(x, "fsdp", 1), ("fsdp",), P("fsdp"), P(None, "fsdp"))
        np.testing.assert_array_equal(jax.jit(summed)(rows), rows.sum(0, keepdims=True))
        whole = manual(lambda x: gather_parts(x, "fsdp", 1), ("fsdp",), P(None, "fsdp"), P())
        np.testing.assert_array_equal(jax.jit(whole)(rows), rows)


def test_columns_whose_registers_have_a_large_prime_are_summed_in_two_arrays():
    for size in (32768, 128000, 4097, 128):
        assert summed_columns(size, 64) == [slice(None)]
    for size, most in ((128256, 128000), (151936, 151552), (167 * 1024, 166 * 1024)):
        assert summed_columns(size, 16) == [slice(most), slice(most, size)]


def test_constrain_keeps_the_compilers_axes_inside_of_a_region():
    def region(x):
        return sl.constrain(x, "batch", "mlp")

    text = jax.jit(manual(region, ("stage",), P("stage"), P("stage"))).lower(X).as_text()
    constraint = next(line for line in text.splitlines() if "sharding_constraint" in line)
    assert '[{"data"}, {"tensor"}]' in constraint


def test_a_dim_that_the_rest_of_the_mesh_does_not_divide_is_refused_inside_too():
    def region(x):
        return sl.constrain(x, "batch", None)

    with pytest.raises(RuleError, match=r"data\+fsdp\+expert=2 does not divide 3"):
        jax.jit(manual(region, ("stage",), P("stage"), P("stage")))(jnp.ones((6, 2)))


def test_an_axis_that_is_taken_or_absent_is_refused():
    with pytest.raises(MeshError, match=r"axes context cannot .*\n  Choose among stage, data, ten"):
        manual(lambda x: x, ("context", "data"), P(), P())

    def again(x):
        return manual(lambda x: x, ("stage",), P(), P())(x)

    with pytest.raises(MeshError, match="Choose among data, tensor"):
        jax.jit(manual(again, ("stage",), P("stage"), P("stage")))(X)


def test_outside_of_use_there_is_no_axis():
    def elsewhere():
        assert axis_size("data") == 1
        with pytest.raises(MeshError, match="no mesh is active"):
            manual(lambda x: x, ("data",), P(), P())

    contextvars.Context().run(elsewhere)
