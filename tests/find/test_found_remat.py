"""Rematerialisation is found with the rules, where memory needs it."""

import functools

import optax
import pytest
from flax import nnx
from jax import numpy as jnp
from unannotated_lm import LM, Recomputed, batch, loss, shapes

import shardlib as sl
from shardlib.errors import ConfigError, DoesNotFitError, ModelError

SIZES = {"layers": 4, "dim": 1024, "heads": 8}
MAKES = {
    name: functools.partial(cls, **SIZES) for name, cls in [("none", LM), ("full", Recomputed)]
}
RUNTIME = 2e9
"""Bytes of a GPU that no program may use."""


def find(make=MAKES, **options):
    options = {"loss": loss, "batch": shapes(64, 512), "optimizer": optax.adamw(1e-3)} | options
    return sl.find_rules(make, **{"on": "8xh100", "mesh": "fsdp=8"} | options)


@pytest.fixture(scope="module")
def kept():
    """The rules of a step that keeps everything."""
    return find(MAKES["none"], microbatches=1)


def memory(kept, share=0.7):
    """Bytes of a device with a share of what a step holds that keeps everything."""
    return RUNTIME + share * (kept.prices[0].memory_bytes - RUNTIME)


@pytest.mark.mesh
def test_nothing_is_recomputed_or_traced_where_everything_fits(kept):
    traced = []

    class Full(Recomputed):
        def __call__(self, tokens):
            traced.append("full")
            return super().__call__(tokens)

    found = find({"none": MAKES["none"], "full": functools.partial(Full, **SIZES)})
    assert (found.remat, found.microbatches, traced) == ("none", 1, [])
    assert found.rules == kept.rules
    assert found.prices[0].seconds == kept.prices[0].seconds
    assert kept.remat is None


@pytest.mark.mesh
def test_layers_are_recomputed_where_memory_binds(kept):
    options = {"microbatches": 1, "memory_bytes": memory(kept)}
    with pytest.raises(DoesNotFitError):
        find(MAKES["none"], **options)
    found = find(**options)
    assert found.remat == "full"
    assert found.prices[0].memory_bytes <= memory(kept)
    assert found.prices[0].seconds > kept.prices[0].seconds
    assert str(found).startswith("rules found for fsdp=8, remat full on 8xh100: ")
    assert found.to_dict()["remat"] == "full"


@pytest.mark.mesh
def test_the_answer_is_the_best_of_all_programs():
    """The search leaves out what cannot be quicker, and nothing else."""
    told, options = [], {"on": "2xh100", "batch": shapes(16, 512)}
    kept = find(MAKES["none"], mesh="fsdp=2", microbatches=1, **options)
    options |= {"mesh": None, "memory_bytes": memory(kept)}
    found = find(notify=told.append, **options)
    each = {name: find(make, **options) for name, make in MAKES.items()}
    best = min(each, key=lambda name: each[name].prices[0].rank)
    assert (found.remat, found.mesh_text) == (best, each[best].mesh_text)
    assert found.microbatches == each[best].microbatches
    seconds = found.prices[0].rank
    assert seconds == pytest.approx(each[best].prices[0].rank, rel=1e-6)
    assert any(f"remat {best}: " in line for line in told)


@pytest.mark.mesh
def test_an_answer_is_forbidden_for_its_program_alone(kept):
    first = find(microbatches=1)
    full = find(microbatches=1, memory_bytes=memory(kept))
    assert (first.remat, full.remat) == ("none", "full")
    assert find(microbatches=1, forbidden=[full]).rules == first.rules
    other = find({"none": MAKES["none"]}, microbatches=1, forbidden=[first, full])
    assert other.solution.layouts != first.solution.layouts


def test_an_error_names_what_was_tried(kept):
    with pytest.raises(DoesNotFitError, match=r"any remat \(none, full\): .* at least .* has"):
        find(microbatches=1, memory_bytes=memory(kept, 0.15))


class Small(nnx.Module):
    def __init__(self, rngs, width=4, dtype=jnp.float32, value=nnx.Param, count=nnx.BatchStat):
        self.kernel = value(jnp.zeros((4, width), dtype))
        self.count = count(jnp.zeros(()))


@pytest.mark.parametrize(
    ("other", "path"),
    [
        ({"width": 8}, "kernel"),
        ({"dtype": jnp.bfloat16}, "kernel"),
        ({"value": nnx.Variable}, "kernel"),
        ({"count": nnx.Param}, "count"),
    ],
)
def test_models_with_another_state_are_refused_before_any_is_traced(other, path):
    makes = {"none": Small, "dots": Small, "full": functools.partial(Small, **other)}
    with pytest.raises(ModelError, match=rf"of remat none:\n    full: {path}\n  Let each"):
        find(makes)


def test_a_mapping_without_a_model_is_refused():
    with pytest.raises(ConfigError, match=r"without a model.*\n.*module factory"):
        find({})


@pytest.mark.mesh
def test_the_found_program_trains_as_one_device_does(kept):
    rules = find(microbatches=1, memory_bytes=memory(kept)).rules.at_other_sizes()
    small = functools.partial(Recomputed, layers=2)
    compared = sl.testing.assert_equivalent(small, loss, batch(16), ["fsdp=8"], rules=rules)
    assert compared.comparisons
