"""No answer of a mesh is quicker than the bound that lets the search leave its program out."""

import functools

import optax
import pytest
from unannotated_lm import LM, Recomputed, loss, shapes

import shardlib as sl
from shardlib.cost.layout import Layout

pytestmark = pytest.mark.mesh

SIZES = {"layers": 2, "dim": 1024, "heads": 8}
MAKES = {
    name: functools.partial(cls, **SIZES) for name, cls in [("none", LM), ("full", Recomputed)]
}


@functools.cache
def traced(name, on):
    """Returns the search on a mesh with one traced program."""
    options = {"loss": loss, "batch": shapes(64, 512), "optimizer": optax.adamw(1e-3)}
    found = sl.find_rules(MAKES[name], on=on, mesh=f"fsdp={on.partition('x')[0]}", **options)
    return found.compare.func.__self__


def cut_as_the_mesh_says(price):
    """Returns whether an answer is of its own mesh: others are those of another mesh too."""
    return not price.name.startswith(("fsdp=", "rows over tensor"))


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("on", ["4xh100", "8xh100"])
def test_the_bound_of_a_mesh_is_never_above_its_answers(name, on):
    search, least = traced(name, on), traced("none", on)
    for sizes in search.meshes():
        bound = search.least_seconds + least.extra_seconds(sizes)
        assert bound > 0
        for microbatches in (1, 4):
            if microbatches in search.microbatch_counts(sizes):
                found = search.on_mesh(sizes, microbatches, 60.0, alone=False)
                quickest = min(p.seconds for p in found.prices if cut_as_the_mesh_says(p))
                assert bound <= quickest, (str(Layout.of(sizes)), microbatches)


def test_the_bound_of_a_mesh_knows_what_it_sends():
    """Eight devices with whole rows send all activations."""
    search = traced("none", "8xh100")
    alone = dict.fromkeys(("data", "fsdp", "expert", "context", "tensor"), 1)
    apart, together = ({**alone, axis: 8} for axis in ("data", "tensor"))
    assert search.extra_seconds(apart) < search.extra_seconds(together)
