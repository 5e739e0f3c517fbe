"""Models that know nothing of shardlib train on meshes as on one device, shardlib partitioning."""

import dataclasses
import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.registry import TEXT, DataSpec, family
from shardlib.rules import FSDP, SEQUENCE, STANDARD, ZERO1
from shardlib.testing import assert_equivalent
from shardlib.train.local_sgd.outer import group_means
from shardlib.train.reduce.reduction import ReductionConfig
from shardlib_models.resnet import ResNetConfig
from shardlib_models.transformer import TransformerConfig
from unannotated import CASES, Case, squared_error, vectors

MESH, ONE = "data=2,fsdp=2,tensor=2", "data=1"
SGD = optax.sgd(0.1, 0.9)
ROWS = 16
REGION = "/shard_map/"
"""What the program says of operations that shardlib has placed."""
NESTED = "/shard_map/shard_map/"
"""The same where shardlib's region over fsdp and tensor stands inside of one over data."""


def equivalent(case, mesh=MESH, **options):
    """Holds three steps of AdamW against one device; returns the text of the program."""
    options = {"rules": case.rules, "optimizer": optax.adamw(1e-3), **options}
    found = assert_equivalent(
        case.model, case.loss, case.batch(ROWS), mesh, inputs=case.inputs, **options
    )
    return found.comparisons[0].compiled.as_text()


def start(case, mesh, seed=0):
    devices = jax.devices()[: 1 if mesh == ONE else 8]
    with sl.use(sl.make_mesh(mesh, devices=devices), case.rules):
        return sl.init_state(case.model, SGD, inputs=case.inputs, seed=seed)


def close(tree, other, tolerance=2e-5):
    """Compares trees of numbers of size 1, made by sums of at most a few hundred float32 terms in
    another order: 2**-24 each, chained through three steps."""
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.mesh
@pytest.mark.parametrize("name", ["dense", "convolutions"])
def test_models_that_xla_gets_wrong(name):
    """Faults A and B: rows in another order, sums over copies."""
    assert REGION in equivalent(CASES[name])
    with pytest.raises(AssertionError, match=r"the gradient of \S+ is off"):
        equivalent(CASES[name], constrain="user")


WAYS = {
    "microbatches": (MESH, REGION, {"microbatches": 2}),
    "zero1": (MESH, REGION, {"rules": ZERO1}),
    "auto": ("fsdp=8", REGION, {"rules": FSDP}),
    "reduction": (MESH, NESTED, {"reduction": ReductionConfig(dtype="f32")}),
}


@pytest.mark.mesh
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_train(way):
    mesh, placed, options = WAYS[way]
    assert placed in equivalent(CASES["dense"], mesh, **options)


class Dropped(linen.Module):
    """Its masks are those of one device."""

    @linen.compact
    def __call__(self, x):
        for _ in range(2):
            x = linen.Dropout(0.5, deterministic=False)(jnp.tanh(linen.Dense(x.shape[-1])(x)))
        return x


DROPPED = Case(Dropped(), squared_error, vectors, CASES["dense"].paths)


@pytest.mark.mesh
def test_dropout_is_that_of_one_device():
    assert REGION in equivalent(DROPPED)


def train(case, mesh, steps=3, inputs=(), **options):
    """Returns the state after some steps, and the metrics of each."""
    state = start(case, mesh)
    step, metrics = sl.make_train_step(case.loss, **options), []
    for _ in range(steps):
        state, found = step(state, case.batch(ROWS), *inputs)
        metrics.append(jax.device_get(found))
    return state, metrics


@pytest.mark.mesh
def test_narrower_numbers():
    case = CASES["dense"]
    state, metrics = train(case, MESH, precision="bf16")
    expected, expected_metrics = train(case, ONE, precision="bf16")
    # Eight products one after the other, forward and backward, each rounded to 8 bits.
    rounding = 8 * 2.0**-8
    for found, wanted in zip(metrics, expected_metrics, strict=True):
        np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=rounding)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    for x, wanted in ((x, np.asarray(y)) for x, y in pairs if y.ndim):
        np.testing.assert_allclose(x, wanted, rtol=0, atol=rounding * np.abs(wanted).max())


@pytest.mark.mesh
def test_statistics_of_the_whole_batch():
    state, _ = train(CASES["convolutions"], MESH)
    expected, _ = train(CASES["convolutions"], ONE)
    assert len(jax.tree.leaves(state.model_state)) == 2
    close(state.model_state, expected.model_state)


@pytest.mark.mesh
def test_evaluation():
    case = CASES["convolutions"]
    sums = [
        sl.make_eval_step(case.loss)(start(case, mesh), case.batch(ROWS))["loss"].value
        for mesh in (MESH, ONE)
    ]
    np.testing.assert_allclose(*sums, rtol=2e-5)


def distilled(model, batch, rng, teacher):
    difference = model(batch["x"]) - teacher.model(batch["x"])
    outputs = {"rows": sl.Output(difference), "largest": sl.Max(jnp.max(jnp.abs(difference)))}
    return jnp.mean(difference**2), outputs


DISTILLED = dataclasses.replace(CASES["dense"], loss=distilled)


@pytest.mark.mesh
def test_a_teacher_on_the_mesh_and_what_is_reported():
    """The teacher is a state whose parameters lie as the student's."""
    case = DISTILLED
    (state, metrics), (expected, expected_metrics) = (
        train(case, mesh, inputs=(start(case, mesh, seed=1),), microbatches=2)
        for mesh in (MESH, ONE)
    )
    assert metrics[0]["rows"].shape == (ROWS, case.batch(ROWS)["x"].shape[1])
    close(metrics, expected_metrics)
    close((state.params, state.opt_state), (expected.params, expected.opt_state))


@pytest.mark.mesh
def test_groups_that_train_apart():
    """Local SGD, with a teacher that all groups share."""
    case, found = DISTILLED, []
    for mesh in (MESH, ONE):
        local = sl.make_local_sgd(
            sl.make_train_step(case.loss), sl.LocalSGDConfig(groups=2, inner_steps=2)
        )
        groups, losses = local.init(start(case, mesh)), []
        teacher = start(case, mesh, seed=1)
        for _ in range(3):
            groups, metrics = local(groups, case.batch(ROWS), teacher)
            losses.append(group_means({"loss": metrics["loss"]})["loss"])
        found.append((losses, groups.params, groups.momentum, groups.groups.opt_state))
        if mesh == MESH:
            text = local.lower(groups, case.batch(ROWS), teacher).compile().as_text()
            assert NESTED in text
    close(*found)


def programs(make, loss, batch, rules, inputs=(), **options):
    """Returns the step as shardlib gives it to XLA, partitioned by shardlib where it will or not
    at all."""
    with sl.use(sl.make_mesh(MESH), rules):
        state = sl.abstract_state(make, SGD, inputs=inputs)
    steps = [sl.make_train_step(loss, constrain=who, **options) for who in ("auto", "user")]
    return [step.lower(state, batch).as_text() for step in steps]


def text_batch():
    rows = jax.ShapeDtypeStruct((ROWS, 16), jnp.int32)
    names = ("tokens", "targets", "segment_ids", "positions")
    return {**dict.fromkeys(names, rows), "num_bytes": jax.ShapeDtypeStruct((ROWS,), jnp.int32)}


def image_batch():
    images = jax.ShapeDtypeStruct((ROWS, 8, 8, 1), jnp.float32)
    return {"images": images, "labels": jax.ShapeDtypeStruct((ROWS,), jnp.int32)}


LAYERS = {"num_layers": 2, "embed_dim": 32, "num_heads": 4, "mlp_dim": 64}
OUR_MODELS = {
    "transformer": (TransformerConfig(**LAYERS), STANDARD, text_batch, TEXT.axes),
    "sequence": (TransformerConfig(**LAYERS), SEQUENCE, text_batch, TEXT.axes),
    "resnet": (ResNetConfig(depth=18, stem="small", width=8), STANDARD, image_batch, {}),
}


@pytest.mark.mesh
@pytest.mark.parametrize("name", OUR_MODELS)
def test_models_whose_constraints_decide_are_left_as_they_are(name):
    """The same program has the same traffic, memory and time."""
    config, rules, batch, axes = OUR_MODELS[name]
    data = DataSpec(64, 16, num_classes=10, image_shape=(8, 8, 1))
    chosen = family(config.name)

    def loss(model, batch, rng):
        return chosen.loss(model, batch, rng, train=True)

    make = functools.partial(chosen.make, config, data)
    auto, user = programs(make, loss, batch(), rules, batch_axes=axes)
    assert auto == user


@pytest.mark.mesh
def test_a_derivative_that_shardlib_cannot_partition_is_reported():
    """The loss itself could be partitioned; what its derivative holds is part of the decision."""

    @jax.custom_vjp
    def same(x):
        return x

    def backward(_, gradient):
        jax.debug.callback(lambda: None)
        return (gradient,)

    same.defvjp(lambda x: (x, None), backward)
    case = CASES["dense"]

    def loss(model, batch, rng):
        return same(case.loss(model, batch, rng))

    state = start(case, MESH)
    found = sl.make_train_step(loss).partition(state, case.batch(ROWS))
    assert found.by == "XLA"
    assert "debug_callback" in found.why
    assert "test_training.py" in found.why
    assert sl.make_train_step(case.loss).partition(state, case.batch(ROWS)).by == "shardlib"
