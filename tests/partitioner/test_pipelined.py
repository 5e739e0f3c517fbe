"""Stages of a pipeline, each partitioned by shardlib over the mesh axes that are left to it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.explain.analysis.collectives import collectives
from shardlib.registry import TEXT, DataSpec, family
from shardlib.rules import SEQUENCE, STANDARD
from shardlib.testing import assert_equivalent
from shardlib_models.transformer import TransformerConfig

MESH, WIDTH, ROWS = "stage=2,fsdp=2,tensor=2", 16, 16
RANDOM = np.random.default_rng(0)
BATCH = {name: RANDOM.standard_normal((ROWS, WIDTH), dtype=np.float32) for name in "xy"}
WITHIN = "/shard_map/shard_map/"
"""The name of operations that shardlib partitioned within a stage."""


def linear(rows, columns, names, rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
    return nnx.Linear(rows, columns, kernel_init=init, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = linear(WIDTH, 2 * WIDTH, ("embed", "mlp"), rngs)
        self.down = linear(2 * WIDTH, WIDTH, ("mlp", "embed"), rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.dropout(jax.nn.gelu(self.up(self.norm(x)))))


class Blocks(nnx.Module):
    """Four layers, no activation constrained."""

    def __init__(self, rngs, rate=0.0):
        self.blocks = sl.stack_layers(lambda rngs: Block(rngs, rate), 4, rngs)
        self.head = linear(WIDTH, WIDTH, ("embed", "mlp"), rngs)

    def __call__(self, x):
        return self.head(sl.scan_layers(lambda block, x, _: (block(x), None), self.blocks, x)[0])


def loss(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


SCHEDULES = {
    "1f1b": sl.PipelineConfig(),
    "1f1b, idle stages skip": sl.PipelineConfig(skip_idle=True),
    "interleaved": sl.PipelineConfig(schedule="interleaved"),
}


@pytest.mark.mesh
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_stages_train_as_one_device(schedule):
    options = {"pipeline": schedule, "microbatches": 2}
    found = assert_equivalent(
        Blocks, loss, BATCH, MESH, rules=STANDARD, optimizer=optax.adamw(1e-3), **options
    )
    assert WITHIN in found.comparisons[0].compiled.as_text()


@pytest.mark.mesh
def test_stages_of_groups_train_as_one_device():
    options = {"microbatches": 2, "reduction": sl.ReductionConfig(dtype="f32")}
    mesh, adam = "data=2,stage=2,fsdp=2", optax.adamw(1e-3)
    found = assert_equivalent(Blocks, loss, BATCH, mesh, rules=STANDARD, optimizer=adam, **options)
    text = found.comparisons[0].compiled.as_text()
    assert WITHIN in text
    # Gradients of what all stages share are summed once, over stages and groups.
    sizes = {"data": 2, "stage": 2, "fsdp": 2}
    sums = {c.mesh_axes for c in collectives(text, sizes) if c.kind == "all-reduce"}
    assert ("data", "stage") in sums


def with_dropout(rngs):
    return Blocks(rngs, rate=0.5)


@pytest.mark.mesh
def test_dropout_of_stages_is_that_of_one_device():
    options = {"rules": STANDARD, "optimizer": optax.adamw(1e-3), "microbatches": 2}
    found = assert_equivalent(with_dropout, loss, BATCH, MESH, **options)
    assert WITHIN in found.comparisons[0].compiled.as_text()


@pytest.mark.mesh
def test_dropout_of_groups_is_that_of_one_device():
    """Rows of a group lie together, and those of a microbatch are every other of the group's."""
    order = np.arange(ROWS).reshape(2, ROWS // 4, 2).transpose(1, 0, 2).ravel()
    apart = {"microbatches": 2, "reduction": sl.ReductionConfig(dtype="f32")}
    found = []
    for mesh, num_devices, rows, options in (
        ("data=1", 1, order, {"microbatches": 4}),
        ("data=2,fsdp=2,tensor=2", 8, np.arange(ROWS), apart),
    ):
        with sl.use(sl.make_mesh(mesh, devices=jax.devices()[:num_devices]), STANDARD):
            state = sl.init_state(with_dropout, optax.sgd(0.1), seed=0)
        batch = {name: x[rows] for name, x in BATCH.items()}
        step = sl.make_train_step(loss, **options)
        if num_devices > 1:
            assert step.partition(state, batch).by == "shardlib"
        metrics = step(state, batch)[1]
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    # Sums over 256 numbers of size 1, added in another order; another mask changes the first digit.
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.mesh
def test_stages_evaluate_as_one_device():
    losses = []
    for mesh, num_devices in (("data=1", 1), (MESH, 8)):
        with sl.use(sl.make_mesh(mesh, devices=jax.devices()[:num_devices]), STANDARD):
            state = sl.init_state(Blocks, optax.sgd(0.1), seed=0)
        step = sl.make_eval_step(loss)
        losses.append(float(step(state, BATCH)["loss"].value))
    assert WITHIN in step.program(state, BATCH).lower(state, BATCH).compile().as_text()
    # A mean of 256 squares of size 1, added in another order.
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)


@pytest.mark.parametrize("mesh", [MESH, "stage=4,fsdp=2"])
def test_who_partitions_is_reported(mesh):
    with sl.use(sl.make_mesh(mesh), STANDARD):
        state = sl.abstract_state(Blocks, optax.sgd(0.1))
    found = sl.make_train_step(loss, microbatches=4).partition(state, BATCH)
    assert (found.by, found.why) == ("shardlib", "the model constrains no activation")


@pytest.mark.mesh
@pytest.mark.parametrize("rules", [STANDARD, SEQUENCE], ids=["standard", "sequence"])
def test_stages_whose_constraints_decide_are_left_as_they_are(rules):
    config = TransformerConfig(num_layers=2, embed_dim=32, num_heads=4, mlp_dim=64)
    chosen, data = family(config.name), DataSpec(64, 16)
    batch = dict.fromkeys(TEXT.axes, jax.ShapeDtypeStruct((ROWS, 16), jnp.int32))
    with sl.use(sl.make_mesh(MESH), rules):
        state = sl.abstract_state(lambda rngs: chosen.make(config, data, rngs), optax.sgd(0.1))

    def of_text(model, batch, rng):
        return chosen.loss(model, batch, rng, train=True)

    auto, user = (
        sl.make_train_step(of_text, microbatches=2, batch_axes=TEXT.axes, constrain=who)
        for who in ("auto", "user")
    )
    assert auto.lower(state, batch).as_text() == user.lower(state, batch).as_text()
