import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from shardlib.losses import Mean, cross_entropy, masked_mean

RTOL = 1e-5


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
