"""No answer of a mesh is quicker than the bound that lets the search leave its program out."""

import functools

import optax
import pytest
from unannotated_lm import LM, Recomputed, Stacked, loss, shapes

import shardlib as sl
from shardlib.cost.layout import Layout
from shardlib.find.search import SEARCHED

pytestmark = pytest.mark.mesh

SIZES = {"layers": 2, "dim": 1024, "heads": 8}
MODELS = {"none": LM, "full": Recomputed, "stacked": Stacked}
MAKES = {name: functools.partial(cls, **SIZES) for name, cls in MODELS.items()}
LEAST = {"none": "none", "full": "none", "stacked": "stacked"}
"""The model that recomputes least, by name."""


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
    search, least = traced(name, on), traced(LEAST[name], on)
    for sizes in search.meshes():
        for microbatches in (1, 2, 4, 16):
            if microbatches in search.microbatch_counts(sizes):
                bound = search.least_seconds(sizes, microbatches)
                bound += least.extra_seconds(sizes)
                assert bound > 0
                found = search.on_mesh(sizes, microbatches, 60.0, alone=False)
                quickest = min(p.seconds for p in found.prices if cut_as_the_mesh_says(p))
                assert bound <= quickest, (str(Layout.of(sizes)), microbatches)


def test_the_bound_of_a_mesh_knows_what_it_sends():
    """Eight devices with whole rows send all activations."""
    search = traced("none", "8xh100")
    alone = dict.fromkeys(SEARCHED, 1)
    apart, together = ({**alone, axis: 8} for axis in ("data", "tensor"))
    assert search.extra_seconds(apart) < search.extra_seconds(together)


def test_the_bound_of_stages_knows_that_they_idle():
    search = traced("stacked", "8xh100")
    sizes = dict.fromkeys(SEARCHED, 1) | {"stage": 2, "data": 4}
    few, many = (search.least_seconds(sizes, parts) for parts in (2, 16))
    assert few > 1.2 * many > 0
