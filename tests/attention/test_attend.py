import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.mesh import abstract_mesh
from shardlib.nn.attention import attend, resolve_backend

# Means of at most 12 values of size about 1, weighted by a softmax in float32.
ATOL = 2e-6


jitted = jax.jit(attend, static_argnames=("causal", "window", "backend"))


def example(batch=2, length=12, heads=4, kv_heads=2, dim=8, seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((batch, length, n, dim) for n in (heads, kv_heads, kv_heads))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def reference(query, key, value, sees):
    """Attention by loops in float64; `sees(row, column)` of one example."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.zeros(query.shape)
    batch, length, heads, dim = query.shape
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // key.shape[2])
            for t in range(length):
                seen = [s for s in range(key.shape[1]) if sees(b, t, s)]
                scores = key[b, seen, g] @ query[b, t, h] / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ value[b, seen, g]
    return out


SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0, 0], [1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3]])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_equals_a_loop(kv_heads, causal, packed):
    arrays = example(kv_heads=kv_heads)
    segments = jnp.asarray(SEGMENTS, jnp.int32) if packed else None

    def sees(b, t, s):
        return (not packed or SEGMENTS[b, t] == SEGMENTS[b, s]) and (not causal or s <= t)

    actual = jitted(*arrays, segment_ids=segments, causal=causal)
    np.testing.assert_allclose(actual, reference(*arrays, sees), atol=ATOL)


@pytest.mark.parametrize("packed", [True, False])
def test_a_bias_is_added_to_the_scores(packed):
    """A bias of -1e9 hides a pair, and its gradient is that of the scores."""
    query, key, value = example()
    hidden = (
        jax.random.bernoulli(jax.random.key(1), 0.4, (4, 12, 12)) & ~jnp.eye(12, dtype=bool)[None]
    )
    segments = jnp.asarray(SEGMENTS, jnp.int32) if packed else None
    bias = jnp.where(hidden, -1e9, 0.0)
    actual = jitted(query, key, value, segment_ids=segments, bias=bias, causal=False)
    expected = np.zeros(actual.shape)
    for head in range(4):
        same = np.asarray(~hidden[head])

        def sees(b, t, s, same=same):
            return same[t, s] and (not packed or SEGMENTS[b, t] == SEGMENTS[b, s])

        expected[:, :, head] = reference(query, key, value, sees)[:, :, head]
    np.testing.assert_allclose(actual, expected, atol=ATOL)


def test_a_bias_has_the_gradient_of_the_scores():
    query, key, value = example(heads=2, kv_heads=2)
    bias = jax.random.normal(jax.random.key(1), (2, 12, 12))

    def by_bias(bias):
        return jnp.sum(attend(query, key, value, bias=bias, scale=1e-6) ** 2)

    def by_scores(bias):
        # Queries that are one-hot read the bias as keys.
        rows = jnp.broadcast_to(jnp.eye(12)[None, :, None], (2, 12, 2, 12))
        keys = jnp.broadcast_to(jnp.transpose(bias, (2, 0, 1))[None], (2, 12, 2, 12))
        return jnp.sum(attend(rows, keys, value, scale=1.0) ** 2)

    found, expected = (jax.jit(jax.grad(f))(bias) for f in (by_bias, by_scores))
    # Scores of 1e-6 are left of query and key.
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_bias_is_partitioned_by_the_compiler():
    arrays = example(batch=4, length=16, heads=4, kv_heads=4)
    bias = jax.random.normal(jax.random.key(1), (4, 16, 16))
    with sl.use(sl.make_mesh("data=2,tensor=2,context=2"), sl.rules.STANDARD):
        shared = jax.jit(functools.partial(attend, bias=bias))(*arrays)
    np.testing.assert_allclose(shared, attend(*arrays, bias=bias), atol=ATOL)


@pytest.mark.parametrize("window", [1, 2, 5, 12, 14])
def test_a_window_counts_the_query_itself(window):
    arrays = example()
    actual = jitted(*arrays, window=window)
    expected = reference(*arrays, lambda b, t, s: t - window < s <= t)
    np.testing.assert_allclose(actual, expected, atol=ATOL)


def test_positions_hide_the_empty_rows_of_a_cache():
    query, key, value = example()
    rows = jnp.array([[5, 6, 7], [5, 6, 7]])
    garbage = jnp.where(jnp.arange(12)[None, :, None, None] > 7, 1e9, 0.0)
    actual = jitted(query[:, 5:8], key + garbage, value + garbage, positions=rows)
    np.testing.assert_allclose(actual, jitted(query, key, value)[:, 5:8], atol=ATOL)


def test_padding_is_finite_and_nothing_else_sees_it():
    query, key, value = example()
    segments = jnp.asarray(SEGMENTS, jnp.int32)
    real = (segments > 0)[:, :, None, None]

    def total(arrays):
        out = attend(*arrays, segment_ids=segments)
        return jnp.sum(jnp.where(real, out, 0.0) ** 2), out

    gradients, out = jax.jit(jax.grad(total, has_aux=True))((query, key, value))
    assert jnp.all(jnp.isfinite(out))
    for gradient in gradients:
        assert jnp.all(jnp.isfinite(gradient))
        assert jnp.all(jnp.where(real, 0.0, gradient) == 0)


def test_a_row_that_sees_nothing_is_finite():
    query, key, value = example()
    ones = jnp.ones((2, 12), jnp.int32)

    def total(query):
        return attend(query, key, value, segment_ids=ones, kv_segment_ids=2 * ones).sum()

    found, gradient = jax.jit(jax.value_and_grad(total))(query)
    assert jnp.isfinite(found)
    assert jnp.all(jnp.isfinite(gradient))


def test_bfloat16_in_and_out_with_a_float32_softmax():
    arrays = example(dtype=jnp.bfloat16)
    out = jitted(*arrays)
    assert out.dtype == jnp.bfloat16
    exact = jitted(*(x.astype(jnp.float32) for x in arrays))
    # Weights and result are each rounded to 8 bits of mantissa.
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2 * 2**-8 * float(exact.max()))
    total = jax.grad(lambda q: attend(q, *arrays[1:]).astype(jnp.float32).sum())
    assert jax.eval_shape(total, arrays[0]).dtype == jnp.bfloat16


def test_heads_sharded_over_more_devices_than_key_value_heads():
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    query, key, value = example(heads=8, kv_heads=2)
    sharded = jax.device_put(query, NamedSharding(mesh, P(None, None, "tensor", None)))
    compiled = jax.jit(attend, out_shardings=sharded.sharding).lower(sharded, key, value).compile()
    assert not any(
        name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all")
    )
    key, value = jax.device_put((key, value), NamedSharding(mesh, P()))
    np.testing.assert_allclose(compiled(sharded, key, value), attend(query, key, value), atol=ATOL)


def test_backend_is_chosen_for_a_reason():
    gpu = {"platform": "gpu", "dtype": jnp.bfloat16, "head_dim": 64}
    assert resolve_backend("auto", **gpu).backend == "cudnn"
    assert resolve_backend("xla", **gpu).reason == "asked for"
    for change, reason in (
        ({"platform": "cpu"}, "platform is cpu"),
        ({"platform": "tpu", "lengths": (200, 200)}, "(200, 200) is not a multiple of 128"),
        ({"platform": "tpu", "lengths": (128, 256)}, "the lengths (128, 256) differ"),
        ({"dtype": jnp.float32}, "dtype is float32"),
        ({"head_dim": 20}, "head_dim is 20"),
        ({"masked": True, "lengths": (7, 7)}, "there is a mask, and a length of (7, 7) is odd"),
    ):
        resolved = resolve_backend("auto", **{**gpu, **change})
        assert resolved.backend == "xla"
        assert reason in resolved.reason
    tpu = {"platform": "tpu", "dtype": jnp.float32, "head_dim": 20, "lengths": (256, 256)}
    assert resolve_backend("auto", **tpu).backend == "splash"


def test_long_rows_without_a_kernel_go_tile_by_tile():
    cpu = {"platform": "cpu", "dtype": jnp.float32, "head_dim": 64}
    assert resolve_backend("auto", lengths=(4096, 4095), **cpu).backend == "xla"
    for lengths in ((4096, 4096), (512, 64 * 512)):
        resolved = resolve_backend("auto", lengths=lengths, **cpu)
        assert resolved.backend == "blockwise"
    assert resolved.reason == (
        "the platform is cpu; 512 x 32768 scores a head are too many to keep"
    )
    # A prime length cannot be cut into tiles.
    assert resolve_backend("auto", lengths=(4099, 4099), **cpu).backend == "xla"


def test_a_mesh_without_devices_is_enough_to_trace():
    arrays = example(batch=8, length=32)
    for axes in ("data=8", "context=8"):
        with sl.use(abstract_mesh(axes, 8), sl.rules.STANDARD):
            # A function of its own for each mesh: JAX keeps what it has traced.
            text = str(jax.make_jaxpr(functools.partial(attend))(*arrays))
        assert ("ppermute" in text) == (axes == "context=8")


@pytest.mark.parametrize(
    ("backend", "lengths", "reason"),
    [
        ("splash", (200, 200), "length of .200, 200. is not a multiple of 128"),
        ("blockwise", (512, 4099), "length of 4099 does not divide into tiles of 64 to 512"),
        ("cudnn", (), "the dtype is float32"),
    ],
)
def test_back_ends_are_refused_where_they_cannot_run(backend, lengths, reason):
    match = rf"attention by {backend} cannot run here: .*{reason}.*\n  Use backend 'auto' or 'xla'"
    with pytest.raises(ModelError, match=match):
        resolve_backend(backend, platform="cpu", dtype=jnp.float32, head_dim=64, lengths=lengths)


def refusal(arrays, **options):
    with pytest.raises(ModelError) as error:
        attend(*arrays, **options)
    return str(error.value)


def test_a_bias_is_never_ignored():
    arrays = example()
    bias = jnp.zeros((4, 12, 12))
    assert refusal(arrays, bias=bias[:2]) == (
        "bias has shape (2, 12, 12), expected (4, 12, 12): [heads, length, kv_length].\n"
        "  Give one number for each query head and pair of positions."
    )
    for backend in ("blockwise", "cudnn", "splash"):
        assert refusal(arrays, bias=bias, backend=backend) == (
            f"attention by {backend} does not take a bias.\n  Use backend 'auto' or 'xla'."
        )
    with sl.use(sl.make_mesh("data=4,context=2"), sl.rules.STANDARD):
        assert "without explicit positions or a bias" in refusal(
            example(batch=4, length=128), bias=jnp.zeros((4, 128, 128)), context="ring"
        )


def test_faults_in_shape_and_window():
    query, key, value = example()
    assert re.match(
        r"value has shape \(2, 12, 8\), expected \[batch, .*\n  Reshape it; value\[:, :, None\]",
        refusal((query, key, value[:, :, 0])),
    )
    assert re.match(
        r"4 query heads cannot share 3 key-value heads\.\n  Make the number of query",
        refusal(example(heads=4, kv_heads=3)),
    )
    for options in ({"window": 0}, {"window": 3, "causal": False}):
        assert refusal(example(), **options) == (
            f"an attention window of {options['window']} positions needs causal=True and at least "
            "1 position.\n  Set window=None, or causal=True and window=1 or more."
        )


def test_documents_of_fewer_queries_than_keys_are_not_those_of_the_keys():
    """With one query they would stand for all keys."""
    query, key, value = example()
    ids, rows = jnp.ones((2, 1), jnp.int32), jnp.full((2, 1), 11)
    for options in ({}, {"positions": rows}):
        assert refusal((query[:, -1:], key, value), segment_ids=ids, **options) == (
            "1 segment_ids of the queries do not fit 12 keys.\n  Give kv_segment_ids as well."
        )
    kv_ids = jnp.asarray(SEGMENTS, jnp.int32)
    ids = {"segment_ids": 2 * ids, "kv_segment_ids": kv_ids}
    found = jitted(query[:, 6:7], key, value, positions=rows - 5, **ids)
    wanted = jitted(query, key, value, segment_ids=kv_ids)[:, 6:7]
    np.testing.assert_allclose(found[0], wanted[0], atol=ATOL)


@pytest.mark.parametrize("name", ["positions", "kv_positions"])
def test_explicit_positions_have_one_implementation(name):
    arrays, rows = example(), {name: jnp.broadcast_to(jnp.arange(12)[None], (2, 12))}
    for backend in ("blockwise", "cudnn", "splash"):
        assert refusal(arrays, backend=backend, **rows) == (
            f"attention by {backend} does not take explicit positions.\n"
            "  Use backend 'auto' or 'xla'."
        )
    found, wanted = jitted(*arrays, backend="xla", **rows), jitted(*arrays, **rows)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"context": "ring"}, "context='ring'"),
        ({"context": "gather", "order": "zigzag"}, "context='gather' and order='zigzag'"),
    ],
)
def test_devices_share_rows_that_attend_to_themselves(asked, said):
    query, key, value = example()
    match = f"attention with {said} is for self-attention .*\n  Leave out {said}"
    for arrays, options in (
        ((query[:, -1:], key, value), {"positions": jnp.array([[11], [11]])}),
        ((query, key, value), {"positions": jnp.arange(12)[None]}),
        ((query[:, -1:], key, value), {"causal": False}),
    ):
        with (
            sl.use(sl.make_mesh("data=4,context=2"), sl.rules.STANDARD),
            pytest.raises(ModelError, match=match),
        ):
            attend(*arrays, **asked, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False])
def test_cudnn_equals_xla(packed):
    arrays = example(length=128, dim=64, dtype=jnp.bfloat16)
    segments = jnp.asarray(np.arange(128)[None] // 50 + np.ones((2, 1)), jnp.int32)
    options = {"segment_ids": segments if packed else None, "window": 40}

    def total(arrays, backend):
        out = attend(*arrays, backend=backend, **options).astype(jnp.float32)
        return jnp.sum(out**2), out

    grad = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
    (fast, fast_out), (plain, plain_out) = grad(arrays, "cudnn"), grad(arrays, "xla")
    np.testing.assert_allclose(fast_out, plain_out, atol=0.03)
    for a, b in zip(fast, plain, strict=True):
        # Both are rounded to the 8 bits of bfloat16: neighbours differ by up to 2**-7 relative.
        np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-7, atol=0.1
        )
