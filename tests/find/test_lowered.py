"""The program of a device tells what a step sends before anything is compiled."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from unannotated_lm import LM, loss, shapes

import shardlib as sl
from shardlib.find.simplified import selected, summed_once


def sent_by_compiled(model, mesh, found):
    with sl.use(sl.make_mesh(mesh), found.rules):
        state = sl.abstract_state(model, optax.adamw(1e-3))
        report = sl.explain(sl.make_train_step(loss), state, shapes(16, 64))
    sent = {}
    for one in report.collectives:
        # XLA for CPU makes no reduce-scatter, so that one is counted where it would be.
        sent[one.mesh_axes] = sent.get(one.mesh_axes, 0.0) + one.folded_bytes
    return sent


@pytest.mark.mesh
@pytest.mark.parametrize("scanned", [False, True])
def test_bytes_by_axes_are_those_of_the_compiled_program(scanned):
    def model(rngs):
        return LM(rngs, dim=512, layers=2, scanned=scanned)

    mesh = "fsdp=4,tensor=2"
    found = sl.find_rules(
        model,
        loss=loss,
        batch=shapes(16, 64),
        optimizer=optax.adamw(1e-3),
        on="8xh100",
        mesh=mesh,
        precision="f32",  # which CPU devices send bfloat16 as
    )
    told = {}
    for (_, axes), sent in found.traffic.items():
        told[axes] = told.get(axes, 0.0) + sent
    true = sent_by_compiled(model, mesh, found)
    # XLA for CPU sums all three gradients of what an attention reads, where others add them first:
    # in each of two layers two more sums [4, 64, 512], of which a device sends half.
    told["tensor",] += 2 * 2 * 4 * 64 * 512 * 4 / 2
    assert told == pytest.approx(true, abs=100)


@pytest.mark.mesh
def test_answers_are_ranked_by_what_a_device_runs():
    """The cost of the program is known with and without communication hidden; the same rules for
    the same mesh have it again."""
    found = sl.find_rules(
        lambda rngs: LM(rngs, layers=1),
        loss=loss,
        batch=shapes(16, 64),
        optimizer=optax.adamw(1e-3),
        on="v5e-8",
        mesh="fsdp=4,tensor=2",
    )
    price = found.prices[0]
    assert price.unhidden_seconds >= price.seconds
    again = found.compared_with(found.rules, "again").prices[-1]
    assert (again.seconds, again.memory_bytes) == (price.seconds, price.memory_bytes)
    assert "nothing hidden" in str(found)


def test_sums_over_devices_that_are_added_are_one():
    """Compilers add first; a transposition in between changes nothing."""

    def added(a, b, c):
        sums = (lax.psum_scatter(x, "fsdp", tiled=True) for x in (a, b))
        first, second = (x.T for x in sums)
        return first + second + lax.psum_scatter(c, "fsdp", tiled=True).T

    jaxpr = jax.make_jaxpr(added, axis_env=[("fsdp", 4)])(*(jnp.ones((8, 4)),) * 3).jaxpr
    names = [e.primitive.name for e in summed_once(jaxpr).eqns]
    assert sorted(names) == ["add", "add", "reduce_scatter", "transpose"]
    assert summed_once(jaxpr).outvars == jaxpr.outvars


@pytest.mark.mesh
def test_an_addition_to_one_element_of_each_row_is_elementwise():
    """TPU compilers compare positions where each row has one index, and scatter otherwise."""
    rows = (0, 1)
    numbers = lax.ScatterDimensionNumbers((), (2,), (2,), rows, rows)

    def added(x, ids, more):
        return lax.scatter_add(x, ids, more, numbers, mode="promise_in_bounds")

    x, more = jax.random.normal(jax.random.key(0), (2, 3, 8)), jnp.arange(6.0).reshape(2, 3, 1)
    ids = jnp.array([[1, 7, 0], [3, 3, 2]])[..., None, None]
    closed = jax.make_jaxpr(added)(x, ids, more)
    program = selected(closed.jaxpr)
    assert not {"scatter-add"} & {e.primitive.name for e in program.eqns}
    (made,) = jax.core.eval_jaxpr(program, closed.consts, x, ids, more)
    assert (made == added(x, ids, more)).all()
