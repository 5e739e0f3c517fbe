"""No answer of a mesh is quicker than the bound that lets the search leave its program out."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from unannotated_lm import LM, VOCAB, Recomputed, Stacked, loss, shapes

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
def traced(name, on, precision="bf16"):
    """Returns the search on a mesh with one traced program."""
    options = {"loss": loss, "batch": shapes(256, 512), "optimizer": optax.adamw(1e-3)}
    options["precision"] = precision
    found = sl.find_rules(MAKES[name], on=on, mesh=f"fsdp={on.partition('x')[0]}", **options)
    return found.compare.func.__self__


def cut_as_the_mesh_says(price):
    """Returns whether an answer is of its own mesh: others are those of another mesh too."""
    return not price.name.startswith(("fsdp=", "rows over tensor"))


@pytest.mark.rest("soak", keep=len(MAKES))
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("on", ["8xh100", "4xh100"])
def test_the_bound_of_a_mesh_is_never_above_its_answers(name, on):
    search, least = traced(name, on), traced(LEAST[name], on)
    for sizes in search.meshes():
        for microbatches in (1, 2, 4, 16):
            if microbatches in search.microbatch_counts(sizes):
                bound = search.least_seconds(sizes, microbatches)
                bound += least.extra_seconds(sizes, microbatches)
                assert bound > 0
                found = search.on_mesh(sizes, microbatches, 60.0, alone=False)
                quickest = min(p.seconds for p in found.prices if cut_as_the_mesh_says(p))
                assert bound <= quickest, (str(Layout.of(sizes)), microbatches)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("none", {"data": 16}), ("none", {"fsdp": 16}), ("stacked", {"stage": 2, "data": 8})],
)
def test_the_bound_knows_what_a_slow_network_sums_once(name, sizes):
    """Gradients over `data` are summed once a step, parameters gathered in each microbatch."""
    search = traced(name, "16x1xl4", "f32")
    sizes = dict.fromkeys(SEARCHED, 1) | sizes
    for microbatches in (2, 16):
        bound = search.least_seconds(sizes, microbatches)
        bound += search.extra_seconds(sizes, microbatches)
        found = search.on_mesh(sizes, microbatches, 60.0, alone=False)
        assert bound <= min(p.seconds for p in found.prices if cut_as_the_mesh_says(p))


def test_the_bound_of_a_mesh_knows_what_it_sends():
    """Eight devices with whole rows send all activations."""
    search = traced("none", "8xh100")
    alone = dict.fromkeys(SEARCHED, 1)
    apart, together = ({**alone, axis: 8} for axis in ("data", "tensor"))
    assert search.extra_seconds(apart, 1) < search.extra_seconds(together, 1)


def test_the_bound_of_stages_knows_that_they_idle():
    search = traced("stacked", "8xh100")
    sizes = dict.fromkeys(SEARCHED, 1) | {"stage": 2, "data": 4}
    few, many = (search.least_seconds(sizes, parts) for parts in (2, 16))
    assert few > 1.2 * many > 0


def chunked(model, rows):
    """Computes the head in as many chunks as there are layers, and more."""
    x = model.hidden(rows["tokens"])

    def chunk(total, part):
        x, targets = part
        with jax.numpy_dtype_promotion("standard"):
            logits = model.head(model.norm(x)).astype(jnp.float32)
        return total + optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum(), None

    parts = jax.tree.map(lambda a: a.reshape(8, -1, *a.shape[1:]), (x, rows["targets"]))
    return jax.lax.scan(chunk, jnp.float32(0), parts)[0] / rows["targets"].size


@pytest.mark.parametrize("one", [loss, chunked])
def test_the_layers_are_told_from_other_loops(one):
    """A token takes 12 E^2 + 2 T E multiplications in each layer, and E V in the head."""
    found = sl.find_rules(
        MAKES["stacked"],
        loss=one,
        batch=shapes(64, 512),
        optimizer=optax.adamw(1e-3),
        on="8xh100",
        mesh="fsdp=8",
    )
    layers = 2 * (12 * 1024**2 + 2 * 512 * 1024)
    part = found.compare.func.__self__.stages.part_of_flops
    assert part == pytest.approx(layers / (layers + 1024 * VOCAB), rel=0.01)
