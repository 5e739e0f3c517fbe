"""Router biases take signed steps, and the optimizer never sees them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardlib.nn.moe import balance_biases, route, router_losses, router_stats


@pytest.fixture(autouse=True)
def promotion_as_in_a_step():
    """The step of shardlib calls optax so: it mixes dtypes freely."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def params():
    return {
        "layers": {
            "moe": {"router": {"kernel": jnp.ones((2, 3))}, "router_bias": jnp.zeros((2, 4))},
            "norm": {"scale": jnp.full(3, 2.0)},
        },
        "last": {"router_bias": jnp.zeros(4)},
    }


@pytest.fixture
def grads(params):
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    made = [jnp.asarray(100 * rng.normal(size=x.shape), jnp.float32) for x in leaves]
    tree = jax.tree.unflatten(treedef, made)
    tree["last"]["router_bias"] = jnp.asarray([3.0, 0.0, -1e-7, 1e9])
    return tree


def without_biases(tree):
    moe = {"router": tree["layers"]["moe"]["router"]}
    return {"layers": {"moe": moe, "norm": tree["layers"]["norm"]}}


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(
    "inner",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, weight_decay=0.1)),
        optax.sgd(0.1, momentum=0.9),
    ],
)
def test_others_are_as_if_there_were_no_biases(inner, params, grads):
    optimizer = balance_biases(inner, 0.25)
    state, plain = optimizer.init(params), inner.init(without_biases(params))
    for _ in range(2):
        updates, state = optimizer.update(grads, state, params)
        expected, plain = inner.update(without_biases(grads), plain, without_biases(params))
        jax.tree.map(np.testing.assert_array_equal, without_biases(updates), expected)
        bias = updates["last"]["router_bias"]
        np.testing.assert_array_equal(bias, [-0.25, 0.0, 0.25, -0.25])
        stacked = grads["layers"]["moe"]["router_bias"]
        np.testing.assert_array_equal(
            updates["layers"]["moe"]["router_bias"], -0.25 * np.sign(stacked)
        )
        params = optax.apply_updates(params, updates)


def test_a_model_without_routers_has_the_state_of_its_optimizer(params):
    others = without_biases(params)
    inner = optax.adamw(1e-2)
    assert jax.tree.structure(balance_biases(inner).init(others)) == jax.tree.structure(
        inner.init(others)
    )


def test_biases_even_out_the_load():
    """A router that prefers some experts by far; only its bias is trained."""
    experts, k = 8, 2
    preference = jnp.linspace(-1.5, 1.5, experts)
    optimizer = balance_biases(optax.adamw(1e-3), 0.01)
    params = {"router_bias": jnp.zeros(experts), "kernel": jnp.ones(3)}

    def loss(params, logits):
        bias = params["router_bias"]
        routing = route(logits, k, scores="sigmoid", bias=bias)
        kept = jnp.ones(routing.experts.shape, jnp.bool_)
        total, metrics = router_losses(router_stats(routing, kept, bias=bias), 1)
        return total, metrics["router_max_load"].value

    @jax.jit
    def step(carry, key):
        params, state = carry
        noise = jax.random.normal(key, (4, 128, experts))
        grads, max_load = jax.grad(loss, has_aux=True)(params, noise + preference[None, None])
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), max_load

    keys = jax.random.split(jax.random.key(0), 120)
    (params, _), loads = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    assert float(loads[0]) > 2.0
    assert float(jnp.max(loads[-20:])) < 1.25
    # Preferred experts have the lower bias.
    assert (jnp.diff(params["router_bias"]) < 0).all()
