"""Rules of models whose gradients connect dims that their forward pass does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.find.trace import _has_free_derivative
from shardlib.jaxprs import holds

MESH = "fsdp=4,tensor=2"


@jax.custom_vjp
def one_hot(x):
    """The largest feature of each row, with the gradient of the features themselves."""
    return jax.nn.one_hot(jnp.argmax(x, axis=-1), x.shape[-1], dtype=x.dtype)


one_hot.defvjp(lambda x: (one_hot(x), None), lambda _, cotangent: (cotangent,))


@jax.custom_jvp
def one_hot_by_tangents(x):
    """The same by a `custom_jvp`."""
    return jax.nn.one_hot(jnp.argmax(x, axis=-1), x.shape[-1], dtype=x.dtype)


one_hot_by_tangents.defjvp(lambda x, tangents: (one_hot_by_tangents(*x), tangents[0]))


@jax.custom_jvp
def turned(x):
    return one_hot(x).T


turned.defjvp(lambda x, tangents: (turned(*x), tangents[0].T))


@jax.custom_jvp
def twice(x):
    return jnp.stack([one_hot(x), one_hot(x)])


twice.defjvp(lambda x, tangents: (twice(*x), jnp.stack([tangents[0], tangents[0]])))


def in_one_part(x):
    (x,) = jnp.split(x, 1, axis=-1)
    return x


class Coded(nnx.Module):
    def __init__(self, code, rngs):
        self.code = code
        self.first, self.encode, self.decode = (
            nnx.Linear(*sizes, rngs=rngs) for sizes in ((16, 32), (32, 64), (64, 16))
        )

    def __call__(self, x):
        return self.decode(self.code(self.encode(self.first(x))))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


@pytest.mark.parametrize(
    ("function", "is_free"),
    [
        (jax.nn.relu, False),
        (jax.nn.log_sigmoid, False),
        (jnp.sinc, False),
        (one_hot_by_tangents, True),
        (turned, True),
        (twice, True),
        (lambda x: jax.lax.map(lambda row: one_hot_by_tangents(row), x), True),
    ],
)
def test_functions_whose_derivative_may_connect_more(function, is_free):
    program = jax.make_jaxpr(function)(jnp.zeros((4, 8)))
    assert holds(program.jaxpr, "custom_jvp_call")
    assert _has_free_derivative(program.jaxpr) == is_free


@pytest.mark.mesh
@pytest.mark.parametrize(
    "code",
    [one_hot, one_hot_by_tangents, lambda x: turned(x).T, lambda x: twice(x)[0], in_one_part],
    ids=["straight through", "by tangents", "turned", "twice", "one part"],
)
def test_dims_that_gradients_connect_are_one_axis(code):
    def make(rngs):
        return Coded(code, rngs)

    optimizer = optax.sgd(0.1)
    batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    found = sl.find_rules(
        make, loss=loss, batch=batch, optimizer=optimizer, mesh=MESH, on="v5e-8", precision="f32"
    )
    axes = dict(found.rules.names.params)
    assert axes["encode/kernel"][1] == axes["decode/kernel"][0]
    rules = found.rules.at_other_sizes()
    sl.testing.assert_equivalent(make, loss, batch, MESH, rules=rules, optimizer=optimizer)
    # Each device has its own features of the split.
    paths = {"encode/kernel": (None, "mlp"), "decode/kernel": ("mlp", None)}
    cut = sl.rules.STANDARD.override(paths=paths)
    sl.testing.assert_equivalent(make, loss, batch, MESH, rules=cut, optimizer=optimizer)


class Branches(nnx.Module):
    """Two branches of one inner width: JAX keeps what their gradients need in the same arrays."""

    def __init__(self, rngs):
        self.first, self.second = (
            nnx.List([nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)])
            for _ in range(2)
        )

    def __call__(self, x):
        def through(layers):
            return lambda x: layers[1](jnp.tanh(layers[0](x)))

        return jax.lax.cond(x[0, 0] > 0, through(self.first), through(self.second), x)


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["fsdp=8", MESH])
def test_branches_with_weights_of_their_own(mesh):
    batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    optimizer = optax.sgd(0.1)
    options = {"loss": loss, "batch": batch, "optimizer": optimizer, "precision": "f32"}
    found = sl.find_rules(Branches, mesh=mesh, on="v5e-8", **options)
    rules = sl.rules.from_yaml(sl.rules.to_yaml(found.rules))
    sl.testing.assert_equivalent(Branches, loss, batch, mesh, rules=rules, optimizer=optimizer)
