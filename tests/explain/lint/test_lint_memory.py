"""Faults of donation, planted: a state that is held twice."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from planted import EMBED, ROWS, array, compiled, descend, line_of, make_mesh, mean_square, weights

from shardlib.explain.aot.compile import compile_step
from shardlib.explain.lint import Subject, lint
from shardlib.hardware import parse_cluster

MESH = make_mesh(fsdp=4, tensor=2)
X = array(MESH, (ROWS, EMBED), "fsdp")


def loss(params, x):
    return mean_square(MESH, params, x)


def narrowed(params, x):  # planted
    value, gradients = jax.value_and_grad(loss)(params, x)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    return {"up": new["up"].astype(jnp.bfloat16), "down": new["down"]}, value


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_leaf_that_no_result_takes():
    (found,) = lint(compiled(narrowed, weights(MESH), X))
    assert str(found).startswith(f"{line_of(narrowed, 'planted')}: SL301 params/up")
    assert (found.place, found.bytes) == ("params/up", 2**20)


def test_a_state_that_is_not_donated():
    subject = compiled(descend(loss), weights(MESH), X, donate_argnums=())
    (found,) = lint(subject)
    assert str(found).startswith(f"{line_of(descend, 'step')}: SL302 the step returns a new")


def adam(params, opt_state, x):
    _, gradients = jax.value_and_grad(loss)(params, x)
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, opt_state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.9 * n + 0.1 * g**2, opt_state["nu"], gradients)
    new = jax.tree.map(lambda p, m, n: p - m * jax.lax.rsqrt(n + 1e-8), params, mu, nu)
    return new, {"mu": mu, "nu": nu}


def test_each_part_of_a_state_is_looked_at():
    params = weights(MESH)
    opt_state = {"mu": params, "nu": params}
    found = {
        donated: [finding.place for finding in lint(
            compiled(adam, params, opt_state, X, donate_argnums=donated, out_shardings=None)
        )]
        for donated in ((0,), (0, 1), (1,), ())
    }  # fmt: skip
    assert found == {
        (0,): ["opt_state"], (0, 1): [], (1,): ["params"], (): ["opt_state", "params"],
    }  # fmt: skip


def accumulated(params, parts):
    def add(total, part):
        gradients = jax.grad(loss)(params, part)
        return jax.tree.map(jnp.add, total, gradients), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]


def averaged(params, ema, x):
    del x
    return jax.tree.map(lambda p, e: 0.1 * p + 0.9 * e, params, ema)


@pytest.mark.parametrize(
    ("step", "more"),
    [
        (jax.value_and_grad(loss), (X,)),
        (accumulated, (array(MESH, (2, ROWS, EMBED), None, "fsdp"),)),
        # Which of the two it is the new value of, nobody can tell.
        (averaged, (weights(MESH), X)),
        (lambda params, x: (loss(params, x), params), (X,)),
    ],
    ids=["gradients", "gradients of microbatches", "a mean of two", "what it was given"],
)
def test_results_of_equal_shapes_that_are_no_new_state(step, more):
    subject = compiled(step, weights(MESH), *more, donate_argnums=(), out_shardings=None)
    assert [finding for finding in lint(subject) if finding.code == "SL302"] == []


def test_a_cache_that_a_step_writes_to_is_a_state():
    def decode(params, cache, tokens):
        new = jax.lax.dynamic_update_slice(cache, jnp.tanh(tokens @ params["w"]), (0, 0))
        return new, new.sum()

    params = {"w": array(MESH, (EMBED, EMBED), "fsdp")}
    cache = array(MESH, (16 * ROWS, EMBED), "fsdp")
    subject = compiled(decode, params, cache, X, donate_argnums=(), out_shardings=None)
    assert [f.place for f in lint(subject) if f.code == "SL302"] == ["cache"]


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(EMBED, 1024, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.up(x)).sum()


@pytest.mark.parametrize("cluster", ["cpu:8", "v5e-8"])
def test_a_module_that_is_only_read_need_not_be_donated(cluster):
    if cluster == "v5e-8":
        pytest.importorskip("libtpu", reason="needs the extra tpu")
    model = nnx.eval_shape(lambda: Network(nnx.Rngs(0)))
    _, state = nnx.split(model)
    nnx.update(model, jax.tree.map(lambda a: array(MESH, a.shape, dtype=a.dtype), state))

    @nnx.jit
    def forward(model, x):
        return model(x)

    @nnx.jit
    def train(model, x):
        gradients = nnx.grad(lambda model: model(x))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), gradients))

    def faults(step):
        made = compile_step(step, (model, X), on=parse_cluster(cluster), keep=False)
        return [f for f in lint(Subject.of(made)) if f.code.startswith("SL3")]

    assert faults(forward) == []
    (found,) = faults(train)
    assert (found.code, found.place) == ("SL302", "model")
    # What is moved to other devices is known by its first line that computes.
    assert found.source.rpartition(":")[0] == __file__
