"""Faults of donation, planted: a state that is held twice."""

import jax
import jax.numpy as jnp
import pytest
from planted import EMBED, ROWS, array, compiled, descend, line_of, make_mesh, mean_square, weights

from shardlib.explain.lint import lint

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
    (found,) = lint(compiled(MESH, narrowed, weights(MESH), X))
    assert str(found) == (
        f"{line_of(narrowed, 'planted')}: SL301 params/up float32[4,512,1024] is donated, but no "
        "result has its shape, dtype and sharding: 1.0 MiB on each device are held beside the new "
        "one.\n  Return the new value in the dtype and with the sharding of the old one (cast it, "
        "and pin it with out_shardings), or do not donate it."
    )
    assert (found.place, found.bytes) == ("params/up", 2**20)


def test_a_state_that_is_not_donated():
    subject = compiled(MESH, descend(loss), weights(MESH), X, jit={"donate_argnums": ()})
    (found,) = lint(subject)
    assert str(found) == (
        f"{line_of(descend, 'step')}: SL302 the step returns what it takes, 2 arrays of 2.0 MiB on "
        "each device, and none is donated: old and new are held at once.\n  Donate the state: "
        "jax.jit(step, donate_argnums=0)."
    )


def test_what_is_not_returned_need_not_be_donated():
    options = {"donate_argnums": (), "out_shardings": None}
    assert lint(compiled(MESH, loss, weights(MESH), X, jit=options)) == ()
