"""What a step sends is held against what is expected, with all differences at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.testing import Sent, assert_collectives

HERE = __file__
BATCH = {"x": np.ones((16, 8), np.float32)}


class Model(nnx.Module):
    def __init__(self, rngs):
        def linear(inputs, outputs, *axes):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)
            return nnx.Linear(inputs, outputs, kernel_init=init, use_bias=False, rngs=rngs)

        self.up, self.down = linear(8, 32, "embed", "mlp"), linear(32, 8, "mlp", "embed")

    def __call__(self, x):
        return self.down(jax.nn.relu(sl.constrain(self.up(x), "batch", "mlp")))


def loss(model, batch, rng):
    return jnp.mean(jnp.square(model(batch["x"])))


def start(mesh):
    with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
        state = sl.abstract_state(Model, optax.sgd(0.1))
    return {"state": state, "batch": BATCH}


@pytest.fixture(scope="module")
def compiled():
    """A step compiled under `fsdp=8`, and its mesh."""
    given = start("fsdp=8")
    step = sl.make_train_step(loss).lower(given["state"], given["batch"]).compile()
    return step, given["state"].definition.scope.mesh


def failure(*arguments, **options):
    with pytest.raises(AssertionError) as error:
        assert_collectives(*arguments, **options)
    return re.sub(rf"{re.escape(HERE)}:\d+|/[\w/.-]+\.py:\d+", "FILE:LINE", str(error.value))


def test_a_step_and_what_it_sends():
    report = assert_collectives(
        sl.make_train_step(loss), {("all-reduce", "data")}, **start("data=8")
    )
    assert {c.kind for c in report.collectives} == {"all-reduce"}


def test_reduce_scatter_is_an_all_reduce_on_a_cpu(compiled):
    step, mesh = compiled
    assert_collectives(step, {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}, mesh=mesh)
    assert_collectives(step, {("all-gather", "fsdp"), ("all-reduce", "fsdp")}, mesh=mesh)
    # All of them are cut, so none is left for what is held whole.
    text = failure(
        step,
        {("all-gather", "fsdp"), ("reduce-scatter", "fsdp"), ("all-reduce", "fsdp")},
        mesh=mesh,
    )
    assert text.splitlines()[1:] == ["  missing: all-reduce over fsdp"]
    # A mesh without devices says of no platform that it lacks one.
    text = failure(step, {("all-gather", "fsdp"), ("reduce-scatter", "fsdp")}, mesh={"fsdp": 8})
    assert "missing: reduce-scatter over fsdp" in text
    assert "unexpected: all-reduce over fsdp" in text


def test_an_all_reduce_is_no_reduce_scatter():
    step = sl.make_train_step(loss)
    text = failure(step, {("reduce-scatter", "data")}, **start("data=8"))
    assert text.splitlines()[:3] == [
        "the step on mesh data=8 does not send what was expected:",
        "  missing: reduce-scatter over data",
        "  unexpected: all-reduce over data, 2048 bytes",
    ]


def test_what_is_missing_and_what_nobody_expected(compiled):
    step, mesh = compiled
    text = failure(step, {("all-to-all", "fsdp"), ("all-reduce", "fsdp")}, mesh=mesh)
    lines = text.splitlines()
    assert lines[:3] == [
        "the step on mesh fsdp=8 does not send what was expected:",
        "  missing: all-to-all over fsdp",
        "  unexpected: all-gather over fsdp, 2048 bytes",
    ]
    assert len(lines) == 5
    for line in lines[3:]:
        assert re.fullmatch(r"      1 x f32\[(8,32|32,8)\] at FILE:LINE", line)


def test_counts_and_bytes(compiled):
    step, mesh = compiled
    kernel = 8 * 32 * 4
    amounts = {("all-gather", "fsdp"): Sent(bytes=2 * kernel), ("reduce-scatter", "fsdp"): Sent()}
    assert_collectives(step, amounts, mesh=mesh)
    text = failure(
        step, {("all-gather", "fsdp"): 3, ("all-reduce", "fsdp"): Sent(bytes=1)}, mesh=mesh
    )
    assert text.splitlines()[1] == "  2 times instead of 3: all-gather over fsdp, 2048 bytes"
    assert "2048 bytes instead of 1: all-reduce over fsdp, 2048 bytes" in text


def test_small_collectives_can_be_left_out(compiled):
    step, mesh = compiled
    assert_collectives(step, set(), mesh=mesh, at_least_bytes=2049)


def test_bad_questions(compiled):
    step, mesh = compiled
    with pytest.raises(ModelError, match="'allreduce' is not a kind of collective: all-reduce, "):
        assert_collectives(step, {("allreduce", "fsdp")}, mesh=mesh)
    with pytest.raises(ModelError, match="data is not an axis of mesh fsdp=8"):
        assert_collectives(step, {("all-gather", "data")}, mesh=mesh)
    with pytest.raises(ModelError, match=r"^the mesh of a compiled program is unknown"):
        assert_collectives(step, set())
    with pytest.raises(ModelError, match=r"^a step is compiled for a state and a batch"):
        assert_collectives(sl.make_train_step(loss), set())
