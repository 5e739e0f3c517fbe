"""Layers are cut into stages where a model has one stack of them and that is worth it."""

import functools

import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from unannotated_lm import LM, Stacked, batch, loss, run_layer, shapes

import shardlib as sl
from shardlib.errors import DoesNotFitError, MeshError, RuleError
from shardlib.explain.analysis.collectives import collectives
from shardlib.registry import DataSpec
from shardlib.testing import assert_equivalent
from shardlib_models.transformer import FAMILY
from shardlib_models.transformer_config import TransformerConfig

ADAM = optax.adamw(1e-3)
STAGE = (("stage",),)


def named(rngs, layers=4):
    config = TransformerConfig(num_layers=layers, embed_dim=128, num_heads=4, mlp_dim=256)
    return FAMILY.make(config, DataSpec(vocab_size=512, sequence_length=32), rngs)


MODELS = {"unnamed": (Stacked, loss), "named": (named, functools.partial(FAMILY.loss, train=True))}


def find(make=Stacked, loss=loss, rows=16, length=32, **options):
    options = {"optimizer": ADAM, "on": "8xh100"} | options
    return sl.find_rules(make, loss=loss, batch=shapes(rows, length), **options)


def deep(**options):
    """Finds rules for 80 layers on eight hosts of eight H100s."""
    make = functools.partial(Stacked, layers=80, dim=8192, heads=64)
    return find(make, rows=64, length=2048, on="8x8xh100", **options)


@pytest.mark.mesh
def test_stages_hold_what_no_other_mesh_does():
    """A stage keeps the inputs of its own layers; a row of one microbatch has all 80 elsewhere."""
    found = deep(mesh="stage=8,data=2,tensor=4", microbatches=32)
    assert found.prices[0].memory_bytes < found.capacity_bytes
    assert dict(found.rules.params)["layers"] == STAGE
    assert dict(found.rules.params)["up"] == (("tensor",),)
    with pytest.raises(DoesNotFitError):
        deep(mesh="fsdp=16,tensor=4")


@pytest.mark.soak
def test_deep_models_with_few_rows_on_many_hosts_are_cut_into_stages():
    """Tensor parallelism within a host, a pipeline between hosts, and data parallelism with what is
    left: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
    section 3.4."""
    found = deep()
    assert found.mesh_text == "stage=8,data=2,tensor=4"
    assert found.microbatches == 32


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=2)
@pytest.mark.parametrize(
    ("name", "mesh", "layers"),
    [
        ("named", "stage=2,fsdp=2,tensor=2", 4),
        ("unnamed", "stage=4,data=2", 6),
        ("unnamed", "stage=2,fsdp=2,tensor=2", 4),
        ("named", "stage=4,data=2", 6),
    ],
)
def test_they_train_as_one_device(name, mesh, layers):
    """Also stages with unequally many layers."""
    make, model_loss = MODELS[name]
    make = functools.partial(make, layers=layers)
    found = find(make, model_loss, mesh=mesh, microbatches=4)
    assert dict(found.rules.params)["layers"] == STAGE
    proof = assert_equivalent(
        make,
        model_loss,
        batch(16),
        mesh,
        rules=found.rules,
        optimizer=ADAM,
        microbatches=found.microbatches,
    )
    sizes = sl.MeshConfig.parse(mesh).sizes
    used = collectives(proof.comparisons[0].compiled.as_text(), sizes)
    assert ("collective-permute", ("stage",)) in {(one.kind, one.mesh_axes) for one in used}


@pytest.mark.aot
@pytest.mark.usefixtures("tpu_devices")
def test_their_memory_is_that_of_the_compiled_step():
    """The compiler for TPUs ended the process: scatters within a stage combined their numbers by a
    function with sharding constraints."""
    make = functools.partial(Stacked, layers=8, dim=1024, heads=8)
    small = sl.testing.Small(Stacked, batch(16))
    checked = sl.testing.verified_rules(
        make,
        loss=loss,
        batch=shapes(64, 512),
        optimizer=ADAM,
        on="v5e-8",
        mesh="stage=4,fsdp=2",
        microbatches=8,
        small=small,
    )
    told, true = checked.found, checked.check
    assert told.prices[0].memory_bytes == pytest.approx(true.peak_bytes, rel=0.1)
    assert "equal" in true.numbers
    # The text counts the turns that a stage idles through as well: 14 ticks for 8 microbatches.
    sums = "all-reduce", ("fsdp",)
    assert true.traffic[sums] == pytest.approx(14 / 8 * told.traffic[sums], rel=0.02)


@pytest.mark.mesh
def test_the_search_weighs_stages_by_their_microbatches():
    told = []
    found = find(notify=told.append, rows=64)
    tried = [line for line in told if line.startswith("stage=")]
    assert found.sizes["stage"] == 1, "small layers are quicker without a pipeline"
    assert not any(line.startswith(("stage=8", "stage=3")) for line in tried), "four layers"


@pytest.mark.mesh
@pytest.mark.parametrize("stages", [True, False])
def test_a_search_can_leave_pipelines_out(stages):
    search = find(stages=stages).compare.func.__self__
    assert any(sizes["stage"] > 1 for sizes in search.meshes()) == stages


@pytest.mark.parametrize(
    ("make", "mesh", "match"),
    [
        (
            functools.partial(LM, scanned=True),
            "stage=2,fsdp=4",
            r"one scan_layers, .* does not call it",
        ),
        (functools.partial(Stacked, layers=3), "stage=4,fsdp=2", r"4 stages need 4 layers"),
    ],
    ids=["another loop", "too few layers"],
)
def test_what_cannot_be_cut_is_named(make, mesh, match):
    with pytest.raises(MeshError, match=match):
        find(make, mesh=mesh)


def test_stages_are_not_found_beside_given_rules():
    given = sl.AxisRules({}, {}, paths={"head/kernel": (None, None)})
    with pytest.raises(MeshError, match=r"stage=2, .*given.*\n  Leave out stage"):
        find(mesh="stage=2,fsdp=4", rules=given)


class Counted(Stacked):
    """Carries a number, and runs layers without parameters over inputs of their own."""

    def __call__(self, tokens):
        def layer(block, carry, weight):
            x, number = carry
            return (run_layer(block, x, None)[0] * weight, number), None

        scales = jnp.ones((4,))
        (x, _), _ = sl.scan_layers(layer, self.blocks, (self.tokens(tokens), 0.0), scales)
        x, _ = sl.scan_layers(lambda _, x, scale: (x * scale, None), nnx.Dict(), x, scales)
        return self.head(self.norm(x))


def test_every_scan_of_layers_is_traced():
    assert find(Counted, mesh="fsdp=8").sizes["stage"] == 1


def penalized(model, rows):
    kernels = model.blocks.up.kernel.get_value()
    return loss(model, rows) + 1e-3 * jnp.sum(kernels.astype(jnp.float32) ** 2)


class Normed(Stacked):
    """Updates statistics outside of its layers."""

    def __init__(self, rngs, **sizes):
        super().__init__(rngs, **sizes)
        self.norm = nnx.BatchNorm(128, rngs=rngs)


@pytest.mark.parametrize(
    ("make", "model_loss", "match"),
    [
        (Stacked, penalized, "reads variables of the stacked layers outside"),
        (Normed, loss, "updates variables when it is called: norm/mean, norm/var"),
        (Counted, loss, "calls it 2 times"),
    ],
    ids=["penalty", "statistics", "two stacks"],
)
def test_losses_that_no_pipeline_runs_are_refused(make, model_loss, match):
    with pytest.raises(MeshError, match=match):
        find(make, model_loss, mesh="stage=2,fsdp=4")


def test_each_stage_needs_a_microbatch():
    with pytest.raises(MeshError, match=r"1 microbatches .* stage=2 .*\n  Use microbatches=2"):
        find(mesh="stage=2,fsdp=4", microbatches=1)


def test_rules_without_stages_are_not_compared_with_a_pipeline():
    found = find(mesh="stage=2,fsdp=4", microbatches=2)
    with pytest.raises(RuleError, match="fsdp rules cannot be compared on stage=2,fsdp=4"):
        found.compared_with(sl.rules.FSDP, "fsdp rules")


@pytest.mark.parametrize("rule", ["layers: null", "up: stage"])
def test_nothing_else_cuts_the_layers_of_a_pipeline(rule):
    found = find(mesh="stage=2,fsdp=4", microbatches=2)
    with pytest.raises(
        RuleError, match=r"stage cuts the layers.*\n  Find rules for a mesh without"
    ):
        found.why_not(rule)
