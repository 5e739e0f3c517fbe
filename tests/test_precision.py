"""Precision policies: which leaves are cast, and to what."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ConfigError
from shardlib.functional import functional
from shardlib.functional.precision import Precision, precision
from shardlib.nn.stack import stack_layers

PARAMS = {
    "kernel": jnp.ones((2, 3)),
    "half": jnp.ones(2, jnp.float16),
    "table": jnp.arange(4),
    "mask": jnp.array([True, False]),
    "key": jax.random.key(0),
}


def dtypes(tree):
    return {key: str(leaf.dtype) for key, leaf in tree.items()}


@pytest.mark.parametrize(
    ("name", "stored", "computed"),
    [
        ("f32", "float32", "float32"),
        ("bf16", "float32", "bfloat16"),
        ("bf16_params", "bfloat16", "bfloat16"),
    ],
)
def test_only_floating_leaves_are_cast(name, stored, computed):
    policy = precision(name)
    unchanged = {"table": "int32", "mask": "bool", "key": "key<fry>"}
    assert dtypes(policy.store(PARAMS)) == {"kernel": stored, "half": stored} | unchanged
    assert dtypes(policy.cast_params(PARAMS)) == {"kernel": computed, "half": computed} | unchanged
    wide = {"kernel": "float32", "half": "float32"}
    assert dtypes(policy.cast_batch(PARAMS)) == wide | unchanged


@pytest.mark.parametrize("name", ["bf16", "bf16_params"])
def test_some_parameters_stay_in_float32(name):
    policy = precision(name)
    bias = jnp.full(3, 1.001)
    params = {"layers": {"router": {"kernel": bias, "bias": bias}}}
    for cast in (policy.store, policy.cast_params):
        router = cast(params, {"layers/router/kernel"})["layers"]["router"]
        np.testing.assert_array_equal(router["kernel"], bias)
    assert router["bias"].dtype == jnp.bfloat16
    wider = Precision(jnp.bfloat16, jnp.float32).cast_params(
        {"w": bias.astype(jnp.bfloat16)}, {"w"}
    )
    assert wider["w"].dtype == jnp.float32


def test_which_parameters_stay_in_float32_the_model_says():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.kept = nnx.Param(jnp.ones(2), float32=True)
            self.other = nnx.Param(jnp.ones(2))

    assert functional(Model).float32 == {"kept"}
    layers = functional(lambda rngs: stack_layers(Model, 2, rngs))
    assert layers.float32 == {"kept"}
    with sl.use(sl.make_mesh("data=8"), sl.rules.STANDARD):
        state = sl.init_state(Model, optax.sgd(1.0), precision="bf16_params")
    assert dtypes(state.params) == {"kept": "float32", "other": "bfloat16"}


@pytest.mark.parametrize(("name", "expected"), [("bf16", "float32"), ("bf16_params", "bfloat16")])
def test_optimizer_state_follows_the_stored_parameters(name, expected):
    params = precision(name).store({"w": jnp.ones(3)})
    moments = optax.scale_by_adam().init(params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((moments.mu, moments.nu))} == {expected}


def test_gradients_have_the_dtype_of_the_parameters():
    policy = precision("bf16")
    params = {"w": jnp.linspace(-1, 1, 8)}

    def loss(params):
        computed = policy.cast_params(params)["w"]
        assert computed.dtype == jnp.bfloat16
        return jnp.sum(computed.astype(jnp.float32) ** 2)

    gradient = jax.grad(loss)(params)["w"]
    assert gradient.dtype == jnp.float32
    # One rounding to bfloat16 (8 bits) of the parameter: 2^-8 relative.
    np.testing.assert_allclose(gradient, 2 * params["w"], rtol=2**-8)


def test_a_policy_stands_for_itself():
    policy = Precision(params=jnp.float32, compute=jnp.float16)
    assert precision(policy) is policy
    assert dtypes(policy.cast_params({"w": jnp.ones(1)})) == {"w": "float16"}


def test_an_unknown_name():
    with pytest.raises(ConfigError, match=r"'bf16_param'. Did you mean 'bf16_params'\?\n  Choose"):
        precision("bf16_param")
