"""Every schedule on every mesh gives the gradients of one device, and the bubble of the theory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipelines import Model, make_job, nll

import shardlib as sl
from shardlib.nn.stack import scan_layers
from shardlib.paths import named_leaves
from shardlib.sharding.manual import NESTS_IN_MESH_ORDER_ONLY, manual
from shardlib.train.gradients import LossArguments
from shardlib.train.pipeline import PipelineConfig, bubble_fraction
from shardlib.train.pipeline.gradients import pipelined_gradients

MICROBATCHES = 8
# Float32 sums of some hundred terms in another order, through a backward pass of eight layers.
RELATIVE = 64 * 2.0**-24

CASES = {
    "1f1b, idle stages skip": ("stage=4,tensor=2", PipelineConfig(skip_idle=True)),
    "gpipe": ("stage=2,fsdp=2,tensor=2", PipelineConfig(schedule="gpipe", skip_idle=True)),
    "interleaved": ("stage=4,data=2", PipelineConfig(schedule="interleaved", skip_idle=True)),
    "1f1b, idle stages discard": ("stage=4,tensor=2", PipelineConfig(skip_idle=False)),
    "1f1b, a layer on each stage": ("stage=8", PipelineConfig(skip_idle=True)),
    "interleaved, four chunks": (
        "stage=2,data=4",
        PipelineConfig(schedule="interleaved", chunks_per_stage=4),
    ),
}


MARKS = {
    "1f1b, idle stages skip": (),
    "gpipe": pytest.mark.mesh,
    "interleaved": pytest.mark.mesh,
}


@functools.cache
def expected():
    job = make_job("data=1")
    return jax.device_get(job.gradients(None, MICROBATCHES)(*job.arguments))


def assert_close(tree, wanted):
    tree, wanted = named_leaves(tree), named_leaves(wanted)
    assert tree.keys() == wanted.keys()
    for path, value in wanted.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(tree[path], value, rtol=0, atol=RELATIVE * scale, err_msg=path)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=MARKS.get(case, pytest.mark.soak)) for case in CASES]
)
def test_a_schedule_computes_what_one_device_does(case):
    """Gradients of every leaf, placed as the parameters; sums, model state, and the bubble."""
    mesh, config = CASES[case]
    job = make_job(mesh)
    result = job.gradients(config, MICROBATCHES)(*job.arguments)
    for path, grad in named_leaves(result.grads).items():
        leaf = named_leaves(job.state.params)[path]
        assert grad.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), path
    result = jax.device_get(result)
    assert_close(result.grads, expected().grads)
    read = {path for path, x in named_leaves(result.grads).items() if np.any(x)}
    assert read == set(named_leaves(result.grads)) - {"spare"}
    sums = dict(result.sums)
    bubble, stages = sums.pop("pipeline_bubble"), job.mesh.shape["stage"]
    assert_close(sums, expected().sums)
    assert float(sums["depth"].value) == 8
    jax.tree.map(np.testing.assert_array_equal, result.model_state, expected().model_state)
    theory = bubble_fraction(stages=stages, microbatches=MICROBATCHES, chunks=config.chunks)
    assert bubble.total == stages * (stages - 1) * 2
    assert float(bubble.value) == pytest.approx(theory, rel=1e-6)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize(("mesh", "config"), [
    ("stage=4,tensor=2", None),
    ("stage=2,data=4", PipelineConfig(schedule="interleaved", skip_idle=True)),
])  # fmt: skip
def test_sums_without_gradients(mesh, config):
    job = make_job(mesh)
    sums = jax.device_get(job.sums(MICROBATCHES, config)(*job.arguments))
    assert_close(sums, expected().sums)


@pytest.mark.mesh
@pytest.mark.skipif(NESTS_IN_MESH_ORDER_ONLY, reason="XLA of this jax cannot nest stage in data")
def test_inside_of_another_region():
    """A pipeline in each of two data-parallel groups, which another engine handles by hand."""
    job = make_job("stage=2,data=2,tensor=2", num_layers=2)
    alone = make_job("data=1", num_layers=2)
    half = jax.tree.map(lambda x: x[: len(x) // 2], job.batch)
    spec = jax.sharding.PartitionSpec

    def group(params, batch, key):
        arguments = LossArguments(params, job.state.model_state, batch, key)
        found = pipelined_gradients(job.loss, arguments, microbatches=2)
        return jax.lax.psum(found.grads, "data")

    def run(params, batch, key):
        with sl.use(job.mesh, sl.rules.STANDARD):
            return manual(group, ("data",), (spec(), spec("data"), spec()), spec())(
                params, batch, key
            )

    twice = jax.tree.map(lambda x: np.concatenate([x, x]), half)
    grads = jax.jit(run)(job.state.params, twice, jax.random.key(1))
    once = alone.gradients(None, 2)(*alone.arguments._replace(batch=half))
    assert_close(jax.device_get(grads), jax.tree.map(lambda g: 2 * np.asarray(g), once.grads))


class Whole(Model):
    """Runs its layers itself: what travels between them does not leave the model."""

    def __call__(self, tokens):
        def call(layer, x, _):
            return layer(x, jnp.zeros(x.shape[0], x.dtype)), None

        return scan_layers(call, self.layers, self.embed(tokens))[0]


@pytest.mark.mesh
def test_bfloat16_travels_between_stages():
    def loss(model, batch, rng):
        return nll(model, model(batch["tokens"]), batch)

    make = functools.partial(Whole, 2)
    job = make_job("stage=2,data=4", make=make, loss=loss, dtypes="bf16")
    program = job.gradients(PipelineConfig(), 2).lower(*job.arguments)
    sent = [line for line in program.as_text().splitlines() if "collective_permute" in line]
    assert sum("bf16>" in line for line in sent) == 2, "activations and their gradients"


@pytest.mark.mesh
def test_layers_without_axes_of_their_own_stay_on_every_stage():
    """A stack whose variables name no axes is not split over stages, and is as correct."""
    config = PipelineConfig(skip_idle=True)

    def make(rngs):
        model = Model(4, rngs)
        for name in ("up", "down"):
            getattr(model.layers, name).set_metadata(out_sharding=None)
        return model

    job, alone = (make_job("stage=2", make=make), make_job("data=1", make=make))
    assert job.state.params["layers"]["up"].sharding.is_fully_replicated
    found = job.gradients(config, 2)(*job.arguments)
    wanted = alone.gradients(None, 2)(*alone.arguments)
    assert_close(jax.device_get(found.grads), jax.device_get(wanted.grads))
