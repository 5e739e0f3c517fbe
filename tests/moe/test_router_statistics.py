"""Losses of routers in closed form, and sums that add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlib.nn.moe import Routing, route, router_losses, router_stats

BATCH, LENGTH, EXPERTS, K = 4, 6, 8, 2


def all_kept(routing):
    return jnp.ones(routing.experts.shape, jnp.bool_)


def even_routing():
    """Every expert chosen equally often, with equal probabilities."""
    experts = (jnp.arange(BATCH * 8 * K, dtype=jnp.int32) % EXPERTS).reshape(BATCH, 8, K)
    logits = jnp.full((BATCH, 8, EXPERTS), 3.0)
    even = jnp.full(logits.shape, 1 / EXPERTS)
    return Routing(experts, jnp.full(experts.shape, 1 / K), even, logits)


def random_routing(seed=0):
    logits = jax.random.normal(jax.random.key(seed), (BATCH, LENGTH, EXPERTS))
    return route(logits, K)


def random_mask():
    mask = np.random.default_rng(0).random((BATCH, LENGTH)) < 0.7
    mask[2] = False
    return jnp.asarray(mask)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_even_load(over):
    routing = even_routing()
    stats = router_stats(routing, all_kept(routing), over=over)
    loss, metrics = router_losses(stats, 1, balance_loss=0.01, z_loss=0.001)
    assert float(metrics["router_balance"].value) == pytest.approx(1.0, rel=1e-6)
    assert float(metrics["router_max_load"].value) == 1.0
    assert float(metrics["router_dropped"].value) == 0.0
    assert float(metrics["router_entropy_nats"].value) == pytest.approx(np.log(EXPERTS), rel=1e-6)
    normaliser = 3.0 + np.log(EXPERTS)
    assert float(metrics["router_z"].value) == pytest.approx(normaliser**2, rel=1e-6)
    assert float(loss) == pytest.approx(0.01 + 0.001 * normaliser**2, rel=1e-6)


def balance_by_loop(routing, mask):
    """E sum_i f_i P_i over the tokens of a mask."""
    experts, p = np.asarray(routing.experts)[mask], np.asarray(routing.probabilities)[mask]
    f = np.bincount(experts.ravel(), minlength=EXPERTS) / experts.size
    return EXPERTS * np.sum(f * p.mean(axis=0, dtype=np.float64))


@pytest.mark.mesh
def test_load_balancing_over_the_tokens_that_count():
    routing, mask = random_routing(), random_mask()
    stats = router_stats(routing, all_kept(routing), mask=mask)
    expected = balance_by_loop(routing, np.asarray(mask))
    assert float(stats.tokens) == float(mask.sum())
    assert float(stats.balance / stats.tokens) == pytest.approx(expected, rel=1e-6)
    counts = np.bincount(np.asarray(routing.experts)[np.asarray(mask)].ravel(), minlength=EXPERTS)
    found = float(stats.max_load / stats.tokens)
    assert found == pytest.approx(counts.max() / counts.mean(), rel=1e-6)


@pytest.mark.mesh
def test_by_sequence_any_split_of_the_batch_adds_up():
    routing, mask = random_routing(), random_mask()
    kept = jax.random.bernoulli(jax.random.key(3), 0.8, routing.experts.shape)

    def part(rows):
        return router_stats(
            Routing(*(x[rows] for x in routing)), kept[rows], mask=mask[rows], over="sequence"
        )

    whole = part(slice(None))
    added = part(slice(0, 1)) + part(slice(1, 4))
    # The load of the busiest expert is of a part, not of the whole.
    for name in ("tokens", "balance", "z", "entropy", "dropped", "violation"):
        assert float(getattr(added, name)) == pytest.approx(float(getattr(whole, name)), rel=1e-6)
    own = np.eye(BATCH, dtype=bool)[[0, 1, 3]]  # Row 2 is padding.
    rows = [np.asarray(mask) & row[:, None] for row in own]
    expected = sum(balance_by_loop(routing, row) * row.sum() for row in rows)
    assert float(whole.balance) == pytest.approx(expected, rel=1e-6)


def test_losses_are_summed_over_layers_and_metrics_averaged():
    layers = [router_stats(r, all_kept(r)) for r in (random_routing(0), random_routing(1))]
    single = [router_losses(s, 1, balance_loss=0.1, z_loss=0.01) for s in layers]
    both, metrics = router_losses(layers[0] + layers[1], 2, balance_loss=0.1, z_loss=0.01)
    assert float(both) == pytest.approx(float(single[0][0] + single[1][0]), rel=1e-6)
    for name, mean in metrics.items():
        expected = np.mean([float(m[name].value) for _, m in single])
        assert float(mean.value) == pytest.approx(expected, rel=1e-6)


@pytest.mark.mesh
def test_the_gradient_of_the_bias_is_the_load_above_the_mean():
    logits = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, EXPERTS))
    mask = random_mask()

    def loss(bias, logits):
        routing = route(logits, K, scores="sigmoid", bias=bias)
        stats = router_stats(routing, all_kept(routing), mask=mask, bias=bias)
        return router_losses(stats, 1)[0], routing.experts

    bias = jnp.linspace(-0.2, 0.2, EXPERTS)
    (value, experts), (found, by_logits) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        bias, logits
    )
    assert float(value) == 0.0
    assert not by_logits.any()
    counts = np.bincount(np.asarray(experts)[np.asarray(mask)].ravel(), minlength=EXPERTS)
    above = counts - counts.mean()
    np.testing.assert_allclose(found / np.abs(found).max(), above / np.abs(above).max(), rtol=1e-6)
    # Out of sight in the norm of all gradients.
    assert jnp.linalg.norm(found) < 1e-4


@pytest.mark.mesh
def test_a_batch_of_padding_adds_nothing():
    routing = random_routing()
    nothing = jnp.zeros((BATCH, LENGTH), jnp.bool_)

    def loss(logits, over):
        stats = router_stats(route(logits, K), all_kept(routing), mask=nothing, over=over)
        return router_losses(stats, 1, balance_loss=1.0, z_loss=1.0)[0]

    for over in ("batch", "sequence"):
        value, gradient = jax.value_and_grad(loss)(routing.logits, over)
        assert float(value) == 0.0
        assert not gradient.any()


def test_the_share_that_was_dropped():
    routing, mask = random_routing(), random_mask()
    kept = jnp.zeros(routing.experts.shape, jnp.bool_).at[0, :, 0].set(True)
    stats = router_stats(routing, kept, mask=mask)
    first_row, all_tokens = int(mask[0].sum()), int(mask.sum())
    _, metrics = router_losses(stats, 1)
    expected = 1 - first_row / (K * all_tokens)
    assert float(metrics["router_dropped"].value) == pytest.approx(expected, rel=1e-6)
