"""Layers that the stages do not divide: results of one device, checkpoints and collectives."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from pipelines import Model, make_batch, make_job
from pipelines import loss as job_loss
from test_pipeline_gradients import assert_close

import shardlib as sl
from shardlib.checkpoint import RunCheckpoints
from shardlib.errors import ModelError, RuleError
from shardlib.explain.analysis.collectives import collectives
from shardlib.nn.stages import StageCut
from shardlib.paths import named_leaves
from shardlib.train.pipeline import PipelineConfig, bubble_fraction

MICROBATCHES = 8
SKIPS = PipelineConfig(skip_idle=True)
CASES = {
    "1f1b": ("stage=4,data=2", 5, SKIPS),
    "interleaved": ("stage=4,fsdp=2", 9, PipelineConfig(schedule="interleaved", skip_idle=True)),
    "gpipe": ("stage=4,tensor=2", 7, PipelineConfig(schedule="gpipe", skip_idle=True)),
    "idle slots are discarded": ("stage=2,data=2,tensor=2", 5, PipelineConfig(skip_idle=False)),
}


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 4), st.integers(0, 3))
def test_a_cut_is_whole_and_nearly_equal(num_layers, stages, chunks, before):
    if num_layers < stages * chunks:
        return
    cut = StageCut(num_layers, stages, chunks, before)
    assert sum(cut.counts) == sum(cut.by_stage) == num_layers
    assert max(cut.counts) == cut.slots
    assert min(cut.counts) > 0
    assert cut.is_even == (num_layers % (stages * chunks) == 0)
    others = {cut.slots, cut.slots - 1}
    assert {*cut.counts[1:]} <= others
    assert cut.counts[0] in others or cut.loads[0] in others or cut.counts[0] == 1
    assert cut.firsts == tuple(sum(cut.counts[:place]) for place in range(cut.places))


def test_the_last_stage_and_then_the_first_are_lighter():
    assert StageCut(126, 8).by_stage == (15, 16, 16, 16, 16, 16, 16, 15)
    assert StageCut(63, 8).by_stage == (8, 8, 8, 8, 8, 8, 8, 7)
    assert StageCut(61, 8).by_stage == (7, 7, 8, 8, 8, 8, 8, 7)
    assert StageCut(13, 4, 2).by_stage == (3, 3, 4, 3)
    # Three dense layers come before 58 with experts.
    assert StageCut(58, 8, before=3).by_stage == (4, 7, 8, 8, 8, 8, 8, 7)
    assert StageCut(58, 16, before=3).loads == (4, 3, 3, *[4] * 12, 3)


@functools.cache
def expected(num_layers):
    job = make_job("data=1", num_layers=num_layers)
    return jax.device_get(job.gradients(None, MICROBATCHES)(*job.arguments))


@pytest.mark.mesh
@pytest.mark.rest("soak", keep=2)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case):
    """Gradients are placed as the parameters, and the bubble counts idle slots."""
    mesh, num_layers, config = CASES[case]
    job = make_job(mesh, num_layers=num_layers)
    result = job.gradients(config, MICROBATCHES)(*job.arguments)
    for path, grad in named_leaves(result.grads).items():
        leaf = named_leaves(job.state.params)[path]
        assert grad.sharding.is_equivalent_to(leaf.sharding, leaf.ndim), path
    result, wanted = jax.device_get(result), expected(num_layers)
    assert_close(result.grads, wanted.grads)
    sums = dict(result.sums)
    bubble, stages = sums.pop("pipeline_bubble"), job.mesh.shape["stage"]
    assert_close(sums, wanted.sums)
    theory = bubble_fraction(
        stages=stages, microbatches=MICROBATCHES, chunks=config.chunks, num_layers=num_layers
    )
    assert float(bubble.value) == pytest.approx(theory, rel=1e-6)


def test_the_state_keeps_its_shapes_and_is_cut_by_another_dim():
    job = make_job("stage=2,data=2,tensor=2", num_layers=5)
    layers = job.state.params["layers"]
    assert layers["up"].shape == (5, 4, 8)
    assert layers["up"].sharding.spec == P(None, None, ("tensor", "stage"))
    assert layers["down"].sharding.spec == P(None, ("tensor", "stage"), None)
    found = sl.explain(job.state)
    row = next(row for row in found.rows if row.path == "layers/up")
    assert row.note == "stage shards dim 2: it does not divide 5 layers"
    assert row.copies == 2
    assert not found.faults(0)
    assert "layers on stages: 3, 2\n" in str(found)


@functools.cache
def trained(mesh, optimizer=optax.adamw, precision="f32", wrt=nnx.Param):
    """The state and the losses of two steps."""
    sizes = sl.mesh.MeshConfig.parse(mesh).sizes
    mesh = sl.make_mesh(mesh, devices=jax.devices()[: np.prod([*sizes.values()])])
    staged = sizes.get("stage", 1) > 1
    with sl.use(mesh, sl.rules.STANDARD):
        state = sl.init_state(
            lambda rngs: Model(5, rngs), optimizer(0.01), seed=0, precision=precision, wrt=wrt
        )
        options = {"pipeline": SKIPS} if staged else {}
        step = sl.make_train_step(
            job_loss, microbatches=MICROBATCHES, precision=precision, **options
        )
        losses = []
        for _ in range(2):
            state, metrics = step(state, make_batch())
            losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.mesh
def test_two_steps_are_those_of_one_device_and_their_checkpoint_fits_every_mesh(tmp_path):
    state, losses = trained("stage=4,data=2")
    alone, wanted = trained("data=1")
    assert losses == pytest.approx(wanted, rel=1e-5)
    found, expected = (named_leaves(s.opt_state) | named_leaves(s.params) for s in (state, alone))
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=1e-3, atol=1e-5, err_msg=path)

    def restored(source, like, name):
        with RunCheckpoints(tmp_path / name) as checkpoints:
            checkpoints.save(0, source, {}, wait=True)
            return checkpoints.restore(0, jax.tree.map(placed_like, like))

    other, _ = trained("fsdp=4,tensor=2")
    other, state = ({"params": s.params, "opt_state": s.opt_state} for s in (other, state))
    there = restored(state, other, "there")
    back = named_leaves(restored(there, state, "back"))
    for path, leaf in named_leaves(state).items():
        np.testing.assert_array_equal(named_leaves(there)[path], leaf)
        np.testing.assert_array_equal(back[path], leaf)
        assert back[path].sharding == leaf.sharding


def placed_like(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


@pytest.mark.mesh
def test_frozen_layers_and_bfloat16():
    """What is exchanged is cast before, with the same result."""
    wrt = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("down")))
    state, losses = trained("stage=4,data=2", optax.sgd, "bf16", wrt)
    alone, wanted = trained("data=1", optax.sgd, "bf16", wrt)
    assert "layers/down" in named_leaves(state.model_state)
    assert losses == pytest.approx(wanted, rel=1e-3)
    for path, leaf in named_leaves(alone.params).items():
        np.testing.assert_allclose(named_leaves(state.params)[path], leaf, atol=1e-4, err_msg=path)


def sent(num_layers):
    job = make_job("stage=2,fsdp=2,tensor=2", num_layers=num_layers, dtypes="bf16")
    text = job.gradients(SKIPS, MICROBATCHES).lower(*job.arguments).compile().as_text()
    return [c for c in collectives(text, job.mesh) if "stage" in (c.mesh_axes or ())]


@pytest.mark.mesh
def test_a_step_sends_as_with_even_stages_and_exchanges_layers_once():
    even, uneven = sent(4), sent(5)
    exchanged = [c for c in uneven if c.kind == "all-to-all"]
    assert exchanged
    assert {c.mesh_axes for c in exchanged} == {("stage",)}
    assert not any(c.in_loop for c in exchanged)

    def others(found):
        return sorted((c.kind, c.mesh_axes, c.count, c.shapes) for c in found if c.in_loop)

    assert others(even) == others(uneven)
    assert not [c for c in uneven if c.kind == "all-gather"]


def test_too_few_layers():
    with pytest.raises(RuleError, match="stage=4 does not divide 3"):
        make_job("stage=4,data=2", num_layers=3)
    job = make_job("stage=2,data=4", num_layers=3)
    config = PipelineConfig(schedule="interleaved")
    with pytest.raises(
        ModelError, match=r"2 stages of 2 chunks need 4 layers, and the model has 3\.\n  Use"
    ):
        job.gradients(config, MICROBATCHES).lower(*job.arguments)
