"""What cannot be cut into stages is refused with the reason, while tracing."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pipelines import WIDTH, Layer, Model, loss, make_job, nll

import shardlib as sl
from shardlib.errors import MeshError, ModelError
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.sharding import manual
from shardlib.train.pipeline import PipelineConfig

abstract_job = functools.partial(make_job, is_abstract=True)


def refusal(job, config=None, microbatches=4):
    """The error of the gradients, which stops the tracing."""
    with pytest.raises(ModelError) as raised:
        job.gradients(config or PipelineConfig(), microbatches).lower(*job.arguments)
    return str(raised.value)


def run_layers(model, batch, call, layers=None):
    x = model.embed(batch["tokens"])
    shift = jnp.zeros(len(batch["tokens"]))
    return scan_layers(lambda layer, x, _: call(layer(x, shift)), layers or model.layers, x)


def flat(model, batch, rng):
    return nll(model, model.embed(batch["tokens"]), batch)


def twice(model, batch, rng):
    x, _ = run_layers(model, batch, lambda x: (x, None))
    shift = jnp.zeros(len(batch["tokens"]))
    x, _ = scan_layers(lambda layer, x, _: (layer(x, shift), None), model.layers, x)
    return nll(model, x, batch)


def outputs(model, batch, rng):
    x, _ = run_layers(model, batch, lambda x: (x, (jnp.sum(x), x)))
    return nll(model, x, batch)


def decayed(model, batch, rng):
    mean, _ = loss(model, batch, rng)
    return mean._replace(total=mean.total + jnp.sum(model.layers.up[...] ** 2))


def keyed(model, batch, rng):
    shift = jnp.zeros(len(batch["tokens"]))
    carry = (model.embed(batch["tokens"]), rng)
    (x, _), _ = scan_layers(
        lambda layer, c, _: ((layer(c[0], shift), jax.random.fold_in(c[1], 1)), None),
        model.layers,
        carry,
    )
    return nll(model, x, batch)


LOSSES = [
    (flat, "has no stacked layers to cut into stages.*\n  Make its layers with stack_layers"),
    (twice, "calls scan_layers more than once.*\n  Make one stack of all layers"),
    (outputs, "each layer returns.*\n  Let `call`"),
    (decayed, "reads variables of the stacked layers .* layers/up.\n  Read them only inside"),
    (keyed, "holds key<fry>, which stages cannot send.\n  Let layers draw from streams"),
]


@pytest.mark.parametrize(("loss", "text"), LOSSES, ids=[loss.__name__ for loss, _ in LOSSES])
def test_losses_that_cannot_be_cut(loss, text):
    assert re.search(text, refusal(abstract_job("stage=2", num_layers=2, loss=loss)))


class Normed(Layer):
    """A layer with running statistics."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDTH))

    def __call__(self, x, shift):
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * jnp.mean(x, axis=0))
        return super().__call__(x - self.mean[...][None], shift)


class Counting(Model):
    """A model that counts its calls."""

    def __init__(self, num_layers, rngs):
        super().__init__(num_layers, rngs)
        self.calls = nnx.Variable(jnp.float32(0))

    def embed(self, tokens):
        self.calls.set_value(self.calls[...] + 1)
        return super().embed(tokens)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rngs: Model(2, rngs, Normed), "the layers .* mean.*\n  Use layers without running"),
        (lambda rngs: Counting(2, rngs), "the model .* calls.*\n  Use a model without running"),
    ],
    ids=["in the layers", "outside"],
)
def test_running_statistics(make, text):
    assert re.search(text, refusal(abstract_job("stage=2", make=make)))


class Encoded(Model):
    """A model whose layers read the result of other layers, which the rules divide too."""

    def __init__(self, num_layers, rngs):
        super().__init__(num_layers, rngs)
        self.encoder = stack_layers(Layer, num_layers, rngs)


def after_an_encoder(model, batch, rng):
    x, shift = model.embed(batch["tokens"]), jnp.zeros(len(batch["tokens"]))
    memory, _ = scan_layers(
        lambda layer, x, _: (layer(x, shift), None), model.encoder, x, staged=False
    )
    x, _ = run_layers(model, batch, lambda x: (x + memory, None))
    return nll(model, x, batch)


def test_other_layers_are_not_divided_over_the_stages():
    job = make_job("stage=2", make=lambda rngs: Encoded(2, rngs), loss=after_an_encoder)
    assert re.search("encoder/down, .* over stage.*\n  Make the other layers", refusal(job))


@pytest.mark.mesh
def test_a_ring_inside_of_the_layers():
    """Stages that skip would be missing in it; computed by all, it gives the loss of one device."""

    def ring(x):
        spec = jax.sharding.PartitionSpec("context")

        def back_and_forth(x):
            there = jax.lax.ppermute(x, "context", [(0, 1), (1, 0)])
            return jax.lax.ppermute(there, "context", [(0, 1), (1, 0)])

        return manual.manual(back_and_forth, ("context",), (spec,), spec)(x)

    def ringed(model, batch, rng):
        is_cut = manual.axis_size("context") > 1
        x, _ = run_layers(model, batch, lambda x: (ring(x) if is_cut else x, None))
        return nll(model, x, batch)

    job = make_job("stage=2,context=2", num_layers=2, loss=ringed)
    text = "idle stages cannot skip .* collective-permute.*\n  Set skip_idle to null or false"
    assert re.search(text, refusal(job, PipelineConfig(skip_idle=True)))
    alone = make_job("data=1", num_layers=2, loss=ringed)
    found = job.gradients(PipelineConfig(), 4)(*job.arguments).sums["loss"]
    wanted = alone.gradients(None, 4)(*alone.arguments).sums["loss"]
    assert float(found.value) == pytest.approx(float(wanted.value), rel=1e-6)


def test_a_mesh_without_stages():
    job = abstract_job("data=2", num_layers=2)
    assert re.search("no axis `stage` .*\n  Give the mesh stage=2 or more", refusal(job))


def test_stages_inside_of_a_region_over_a_later_axis(monkeypatch):
    """Where the compiler cannot nest them; elsewhere it is right, as the gradients' test shows."""
    monkeypatch.setattr("shardlib.sharding.manual.NESTS_IN_MESH_ORDER_ONLY", True)
    job = make_job("stage=2,data=2", num_layers=2)
    spec = jax.sharding.PartitionSpec

    def group(batch):
        arguments = job.arguments._replace(batch=batch)
        return job.gradients(PipelineConfig(), 2)(*arguments).grads

    with (
        pytest.raises(MeshError, match=r"(?s)a region over stage is inside.*Handle all of them in"),
        sl.use(job.mesh, sl.rules.STANDARD),
    ):
        jax.jit(manual.manual(group, ("data",), (spec("data"),), spec())).lower(job.batch)


def test_a_lookup_that_ends_the_process_of_newer_compilers(monkeypatch):
    monkeypatch.setattr("shardlib.sharding.manual.NESTS_IN_MESH_ORDER_ONLY", True)
    job = make_job("stage=2,data=2,tensor=2", num_layers=2)
    text = refusal(job, microbatches=2)
    assert re.search(r"the lookup at .*pipelines.py.* tensor cuts; .* if data cuts the ids", text)
    assert "\n  Use shardlib.nn.lookup.lookup, more microbatches" in text


@pytest.mark.parametrize(
    ("schedule", "chunks", "text"),
    [
        ("interleaved", 1, "chunks_per_stage is 1, but interleaved needs at least 2 of them."),
        ("1f1b", 2, "chunks_per_stage is 2, but only interleaved cuts a stage into chunks."),
    ],
)
def test_config_faults(schedule, chunks, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PipelineConfig(schedule=schedule, chunks_per_stage=chunks)
