import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.errors import ModelError
from shardlib.explain.analysis.collectives import collectives
from shardlib.losses import Mean, chunked_cross_entropy, cross_entropy, masked_mean
from shardlib.mesh import make_mesh
from shardlib.rules import SEQUENCE, STANDARD
from shardlib.sharding.constrain import constrain, use

RTOL = 1e-5
ROWS = ("batch", "length")


def example(shape=(3, 5), vocab=11, seed=0):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(3 * rng.normal(size=(*shape, vocab)), jnp.float32)
    return logits, jnp.asarray(rng.integers(0, vocab, shape), jnp.int32)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), smoothing=st.sampled_from([0.0, 0.1, 0.5]))
def test_equals_optax_with_smoothed_labels(seed, smoothing):
    logits, labels = example(seed=seed)
    loss, metrics = cross_entropy(logits, labels, label_smoothing=smoothing)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 11), smoothing)
    expected = optax.softmax_cross_entropy(logits, smooth)
    np.testing.assert_allclose(loss.total, expected.sum(), rtol=RTOL)
    assert loss.weight == 15
    plain = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    np.testing.assert_allclose(metrics["nll_nats"].value, plain.mean(), rtol=RTOL)
    hits = (logits.argmax(-1) == labels).mean()
    np.testing.assert_allclose(metrics["accuracy"].value, hits, rtol=RTOL)


def test_z_loss_is_the_squared_log_normaliser_and_has_its_gradient():
    logits, labels = example()

    def added(logits):
        loss, metrics = cross_entropy(logits, labels, z_loss=0.25)
        return loss.total - metrics["nll_nats"].total

    def expected(logits):
        return 0.25 * jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2)

    np.testing.assert_allclose(added(logits), expected(logits), rtol=RTOL)
    np.testing.assert_allclose(jax.grad(added)(logits), jax.grad(expected)(logits), atol=1e-5)


def test_masked_positions_count_nowhere_whatever_they_hold():
    logits, labels = example()
    mask = jnp.asarray(np.random.default_rng(1).random((3, 5)) < 0.5)
    garbage = jnp.where(mask, labels, -100)

    def total(logits, labels):
        return cross_entropy(logits, labels, mask, label_smoothing=0.1, z_loss=1e-3)[0].total

    assert total(logits, garbage) == total(logits, labels)
    gradient = jax.grad(total)(logits, garbage)
    assert jnp.all(gradient[~mask] == 0)
    assert cross_entropy(logits, labels, mask)[0].weight == int(mask.sum())


@pytest.mark.mesh
def test_microbatches_add_up_to_the_batch():
    logits, labels = example((8, 5))
    mask = jnp.asarray(np.random.default_rng(1).random((8, 5)) < 0.5)
    whole, _ = cross_entropy(logits, labels, mask)
    parts = [cross_entropy(logits[i::4], labels[i::4], mask[i::4])[0] for i in range(4)]
    added = Mean(sum(p.total for p in parts), sum(p.weight for p in parts))
    np.testing.assert_allclose(added.value, whole.value, rtol=RTOL)


def test_a_mean_of_nothing_is_zero_with_zero_gradient():
    def value(x):
        return masked_mean(x, jnp.zeros(3, bool)).value

    assert value(jnp.ones(3)) == 0
    assert jnp.all(jax.grad(value)(jnp.ones(3)) == 0)


def test_bfloat16_logits_are_summed_in_float32():
    logits, labels = example()
    loss, _ = cross_entropy(logits.astype(jnp.bfloat16), labels)
    exact, _ = cross_entropy(logits.astype(jnp.bfloat16).astype(jnp.float32), labels)
    assert loss.total.dtype == jnp.float32
    assert loss.total == exact.total


def test_a_tie_counts_as_the_first_of_the_largest():
    logits = jnp.zeros((1, 4))
    assert cross_entropy(logits, jnp.array([0]))[1]["accuracy"].value == 1
    assert cross_entropy(logits, jnp.array([2]))[1]["accuracy"].value == 0


@pytest.mark.mesh
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_logits_sharded_over_the_vocabulary_stay_where_they_are(axis_type):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(axis_type,) * 2)
    logits, labels = example((4, 6), vocab=16)
    at = jax.device_put(logits, NamedSharding(mesh, P("data", None, "tensor")))
    labels_at = jax.device_put(labels, NamedSharding(mesh, P("data", None)))

    def run(logits, labels):
        def loss(logits):
            return cross_entropy(logits, labels, label_smoothing=0.1, z_loss=1e-3)[0].value

        return jax.value_and_grad(loss)(logits), cross_entropy(logits, labels)[1]

    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(at, labels_at).compile()
        (value, gradient), metrics = compiled(at, labels_at)
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    (expected, expected_gradient), expected_metrics = run(logits, labels)
    np.testing.assert_allclose(value, expected, rtol=RTOL)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    np.testing.assert_allclose(
        metrics["accuracy"].value, expected_metrics["accuracy"].value, rtol=RTOL
    )


CHUNKED = {"label_smoothing": 0.1, "z_loss": 1e-3}


def project(weights, x):
    logits = jax.lax.dot_general(x, weights, (((2,), (0,)), ((), ())))
    return constrain(logits, "batch", "length", "vocab")


def chunked_example(batch=4, length=12, embed=8, vocab=16, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(embed, vocab)), dtype)
    x = jnp.asarray(rng.normal(size=(batch, length, embed)), dtype)
    labels = jnp.asarray(rng.integers(0, vocab, (batch, length)), jnp.int32)
    return weights, x, labels, jnp.asarray(rng.random((batch, length)) < 0.7)


def in_chunks(weights, x, labels, mask, num_chunks):
    return chunked_cross_entropy(
        project, weights, x, labels, mask, num_chunks=num_chunks, **CHUNKED
    )


def whole(weights, x, labels, mask):
    return cross_entropy(project(weights, x), labels, mask, **CHUNKED)


def value_and_gradients(loss):
    def value(weights, x, labels, mask):
        mean, metrics = loss(weights, x, labels, mask)
        return mean.value, metrics

    return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", [None, "data=2,fsdp=2,tensor=2", "context=2,tensor=4", "data=8"])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_chunks_give_the_loss_of_the_whole(mesh, num_chunks):
    arguments = chunked_example(batch=8, length=24)
    expected = value_and_gradients(whole)(*arguments)
    chunked = value_and_gradients(functools.partial(in_chunks, num_chunks=num_chunks))
    if mesh is None:
        found = jax.jit(chunked)(*arguments)
    else:
        with use(make_mesh(mesh), SEQUENCE) as scope:
            placed = [
                scope.sharding(axes, array.shape, kind)
                for array, axes, kind in zip(
                    arguments,
                    [("embed", "vocab"), ("batch", "residual_length", "embed"), *[ROWS] * 2],
                    ["params", *["activations"] * 3],
                    strict=True,
                )
            ]
            found = jax.jit(chunked, in_shardings=placed)(*arguments)
    # Sums of at most 192 float32 terms in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=RTOL, atol=1e-6 * abs(b).max()),
        jax.device_get(found),
        jax.device_get(expected),
    )


def test_weights_of_chunks_travel_outside_of_the_loop():
    arguments = chunked_example(batch=8)
    with use(make_mesh("data=2,fsdp=4"), STANDARD) as scope:
        placed = [
            scope.sharding(("embed", "vocab"), (8, 16)),
            *[
                scope.sharding(("batch", None, None)[: a.ndim], a.shape, "activations")
                for a in arguments[1:]
            ],
        ]
        chunked = value_and_gradients(functools.partial(in_chunks, num_chunks=3))
        compiled = jax.jit(chunked, in_shardings=placed).lower(*arguments).compile()
    found = collectives(compiled, scope.mesh)
    assert not [c for c in found if c.in_loop]
    assert [c.shapes for c in found if c.kind == "all-gather"] == [("f32[8,16]",)]


@pytest.mark.mesh
def test_gradients_of_16_bits_are_added_up_in_float32_over_chunks():
    weights, x, labels, mask = chunked_example(length=64, dtype=jnp.bfloat16)
    (_, _), (narrow, _) = value_and_gradients(functools.partial(in_chunks, num_chunks=64))(
        weights, x, labels, mask
    )
    wide = [a.astype(jnp.float32) for a in (weights, x)]
    (_, _), (exact, _) = value_and_gradients(whole)(*wide, labels, mask)
    assert narrow.dtype == jnp.bfloat16
    # The rounding of one result, and of the logits' gradients that make it up; 64 sums in 16 bits
    # would be off by several times as much.
    np.testing.assert_allclose(
        narrow.astype(jnp.float32), exact, atol=2**-8 * float(jnp.abs(exact).max())
    )


def test_logits_of_one_chunk_live_at_a_time():
    shapes = jax.eval_shape(lambda: chunked_example(length=256, vocab=512))

    def temporaries(num_chunks):
        loss = value_and_gradients(functools.partial(in_chunks, num_chunks=num_chunks))
        return jax.jit(loss).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits_bytes = 4 * 256 * 512 * 4
    # Of a chunk: its logits, their gradient and what the softmax takes in between.
    assert temporaries(16) < logits_bytes / 2
    assert temporaries(1) > logits_bytes


def test_chunks_that_do_not_divide_are_refused():
    arguments = chunked_example()
    fault = r"do not divide rows of 12 positions.*\n  Choose .* that divides "
    with pytest.raises(ModelError, match=f"5 chunks of the loss {fault}12"):
        in_chunks(*arguments, num_chunks=5)
    with (
        use(make_mesh("data=4,context=2"), STANDARD),
        pytest.raises(ModelError, match=f"4 chunks of the loss {fault}6"),
    ):
        in_chunks(*arguments, num_chunks=4)
