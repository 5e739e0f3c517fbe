"""Microbatches: which examples, exact sums, one body, no gathered batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.errors import ModelError
from shardlib.losses import microbatch
from shardlib.losses.microbatch import split


def accumulate(fn, batch, n):
    """Sums of a function that hands nothing on."""
    return microbatch.accumulate(lambda carry, part, i: (carry, fn(part, i)), batch, n, ())[1]


@pytest.mark.mesh
@settings(max_examples=8, deadline=None)  # Each shape is compiled.
@given(n=st.integers(1, 6), each=st.integers(1, 4), width=st.integers(1, 3))
def test_microbatch_i_holds_every_nth_example(n, each, width):
    batch = {"x": jnp.arange(n * each * width).reshape(n * each, width), "y": jnp.arange(n * each)}
    parts = split(batch, n)
    for i in range(n):
        np.testing.assert_array_equal(parts["x"][i], batch["x"][i::n])
        np.testing.assert_array_equal(parts["y"][i], batch["y"][i::n])


def sums(part, index):
    return {
        "total": jnp.sum(part["x"] ** 2),
        "rows": jnp.sum(part["x"], axis=0),
        "count": jnp.int32(part["x"].shape[0]),
        "index": index,
    }


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_accumulate_sums_over_microbatches(n):
    # Small integers: every sum is exact in float32, in any order.
    x = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (12, 5)), jnp.float32)
    result = jax.jit(lambda x: accumulate(sums, {"x": x}, n))(x)
    np.testing.assert_array_equal(result["total"], np.sum(np.square(x)))
    np.testing.assert_array_equal(result["rows"], np.sum(np.asarray(x), axis=0))
    assert int(result["count"]) == 12
    assert int(result["index"]) == sum(range(n))


@pytest.mark.parametrize("n", [1, 4])
def test_bfloat16_is_summed_in_float32(n):
    # 256 + 1 is 256 in bfloat16.
    x = jnp.asarray([256.0, 1.0, 1.0, 1.0], jnp.bfloat16)
    total = accumulate(lambda part, _: jnp.sum(part.astype(jnp.float32)), x, n)
    assert total.dtype == jnp.float32
    assert float(total) == 259.0
    kept = accumulate(lambda part, _: part[0], x, n)
    assert kept.dtype == jnp.float32
    assert float(kept) == (256.0 if n == 1 else 259.0)


def test_one_microbatch_has_no_loop_and_many_have_one_body():
    x = jnp.ones((8, 3))
    traces = []

    def fn(part, index):
        traces.append(part.shape)
        return jnp.sum(part)

    one = jax.make_jaxpr(lambda x: accumulate(fn, x, 1))(x)
    assert "scan" not in str(one)
    assert traces == [(8, 3)]
    many = jax.make_jaxpr(lambda x: accumulate(fn, x, 4))(x)
    assert str(many).count("scan[") == 1
    assert set(traces[1:]) == {(2, 3)}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_carry_goes_from_microbatch_to_microbatch(n):
    x = jnp.arange(8.0)
    carry, total = microbatch.accumulate(
        lambda carry, part, i: (carry * 2 + part[0], jnp.sum(part)), x, n, jnp.float32(1)
    )
    expected = 1.0
    for i in range(n):
        expected = expected * 2 + i
    assert float(carry) == expected
    assert float(total) == 28


def test_gradients_are_those_of_the_whole_batch():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.integers(-4, 4, (16, 3)), jnp.float32)
    w = jnp.asarray(rng.integers(-4, 4, (3,)), jnp.float32)
    grad = jax.grad(lambda w, x: jnp.sum((x @ w) ** 2))
    whole = grad(w, x)
    np.testing.assert_array_equal(accumulate(lambda part, _: grad(w, part), x, 4), whole)


def test_every_indivisible_leaf_is_named():
    batch = {"tokens": jnp.zeros((6, 8)), "weight": jnp.zeros(()), "labels": jnp.zeros((8,))}
    fault = r"tokens has shape \(6, 8\), .*\n.*weight has shape \(\), .*\n  Choose a batch that is"
    with pytest.raises(ModelError, match=fault):
        split(batch, 4)
    with pytest.raises(ModelError, match=r"^0 microbatches were asked for"):
        accumulate(sums, batch, 0)


def test_a_sharded_batch_is_not_gathered():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    replicated = NamedSharding(mesh, P())
    w = jnp.ones((16, 16))

    def step(w, batch):
        grad = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
        return accumulate(lambda part, _: grad(w, part["x"]), batch, 4)

    batch = {"x": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)}
    compiled = jax.jit(step, out_shardings=replicated).lower(w, batch).compile()
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    assert "all-reduce" in text


def test_a_contiguous_split_would_be_moved():
    """The reason for the strides: it fails here when XLA no longer needs them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))

    def contiguous(x):
        parts = x.reshape(4, 16, 16)
        return jax.lax.map(lambda part: jnp.sum(jnp.tanh(part), axis=0), parts)

    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=rows)
    text = jax.jit(contiguous).lower(x).compile().as_text()
    assert any(name in text for name in ("all-gather", "all-to-all", "collective-permute"))
