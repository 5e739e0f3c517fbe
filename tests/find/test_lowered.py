"""The program of a device tells what a step sends before anything is compiled."""

import optax
import pytest
from unannotated_lm import LM, loss, shapes

import shardlib as sl

LEAST_BYTES = 1e5


def sent_by_compiled(model, mesh, found):
    with sl.use(sl.make_mesh(mesh), found.rules):
        state = sl.abstract_state(model, optax.adamw(1e-3))
        report = sl.explain(sl.make_train_step(loss, precision="bf16"), state, shapes(16, 64))
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
    )
    told = {}
    for (_, axes), sent in found.traffic.items():
        told[axes] = told.get(axes, 0.0) + sent
    true = sent_by_compiled(model, mesh, found)
    large = {
        axes for axes in {*told, *true} if max(told.get(axes, 0), true.get(axes, 0)) > LEAST_BYTES
    }
    assert large
    for axes in large:
        assert told.get(axes, 0.0) == pytest.approx(true.get(axes, 0.0), rel=0.15), axes


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
