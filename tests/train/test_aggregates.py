"""Metrics that are not means, and outputs: the same however the batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ModelError
from shardlib.nn.stack import scan_layers, stack_layers
from shardlib.train.evaluate import evaluate
from shardlib.train.local_sgd.outer import group_means

ROWS = 16
BATCH = {
    "x": np.random.default_rng(0).standard_normal((ROWS, 8), dtype=np.float32),
    "id": np.arange(ROWS, dtype=np.int32),
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.dense(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = stack_layers(Block, 2, rngs)

    def __call__(self, x):
        return scan_layers(lambda layer, x, _: (layer(x), None), self.layers, x)[0]


def loss_fn(model, batch):
    y = model(batch["x"])
    bins = jnp.sum(jax.nn.one_hot(batch["id"] % 4, 4, dtype=jnp.int32), axis=0)
    aux = {
        "largest": sl.Max(jnp.max(y)),
        "smallest": sl.Min(jnp.min(y)),
        "largest_id": sl.Max(jnp.max(batch["id"])),
        "of_features": {"max": sl.Max(jnp.max(y, axis=0)), "rows": sl.Sum(jnp.float32(len(y)))},
        "histogram": sl.Sum(bins),
        "y": sl.Output(y),
        "id": sl.Output(batch["id"]),
        "even": sl.Output(batch["id"] % 2 == 0),
    }
    return jnp.mean(jnp.square(y)), aux


def start(mesh):
    rules = sl.rules.STANDARD
    with sl.use(sl.make_mesh(mesh), rules):
        return sl.init_state(Model, optax.sgd(0.0), seed=0)


@pytest.fixture(scope="module")
def expected():
    with jax.default_matmul_precision("highest"):
        y = np.asarray(start({"data": 8}).model(BATCH["x"]))
    return {
        "largest": y.max(),
        "smallest": y.min(),
        "largest_id": ROWS - 1,
        "of_features/max": y.max(axis=0),
        "of_features/rows": ROWS,
        "histogram": np.full(4, ROWS // 4),
        "y": y,
        "id": BATCH["id"],
        "even": BATCH["id"] % 2 == 0,
    }


def check(found, expected):
    for name, value in expected.items():
        # Sums of 8 products in float32.
        np.testing.assert_allclose(np.asarray(found[name]), value, rtol=1e-5, atol=1e-6)


ONCE = sl.ReductionConfig(dtype="f32")  # Summed once a step, over groups.
CASES = {
    "whole": ("data=2,fsdp=2,tensor=2", {}),
    "microbatches": ("data=2,fsdp=2,tensor=2", {"microbatches": 4}),
    "groups": ("data=2,fsdp=4", {"microbatches": 2, "reduction": ONCE}),
    "stages": ("stage=2,data=2,tensor=2", {"microbatches": 4}),
    "stages of groups": ("stage=2,data=4", {"microbatches": 2, "reduction": ONCE}),
}


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("case", CASES)
def test_a_step_reports_those_of_the_whole_batch(case, expected):
    mesh, options = CASES[case]
    state = start(mesh)
    rows = state.definition.scope.sharding(("batch",), (ROWS,), "activations").spec
    _, metrics = sl.make_train_step(loss_fn, **options)(state, BATCH)
    check(metrics, expected)
    assert metrics["y"].sharding.spec == rows
    assert metrics["largest"].sharding.is_fully_replicated
    assert metrics["histogram"].dtype == metrics["id"].dtype == jnp.int32


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("case", ["whole", "microbatches", "groups"])
def test_nan_in_a_part_is_the_extreme_of_the_whole(case):
    def largest(model, batch):
        loss, aux = loss_fn(model, batch)
        extremes = {"top": sl.Max(jnp.max(batch["z"], 0)), "least": sl.Min(jnp.min(batch["z"]))}
        return loss, {**extremes, "id": aux["largest_id"]}

    mesh, options = CASES[case]
    z = np.arange(4.0 * ROWS, dtype=np.float32).reshape(ROWS, 4)
    z[3, 2] = np.nan
    _, metrics = sl.make_train_step(largest, **options)(start(mesh), {**BATCH, "z": z})
    np.testing.assert_array_equal(metrics["top"], np.max(z, 0))
    assert np.isnan(metrics["least"])
    assert metrics["id"] == ROWS - 1


@pytest.mark.mesh
@pytest.mark.parametrize("mesh", ["data=2,fsdp=2,tensor=2", "stage=2,data=2,tensor=2"])
def test_an_evaluation_step_reports_the_same(mesh, expected):
    sums = sl.make_eval_step(loss_fn)(start(mesh), BATCH)
    assert isinstance(sums["largest"], sl.Max)
    check({name: x.value for name, x in sums.items()}, expected)


def numbers_only(model, batch):
    loss, aux = loss_fn(model, batch)
    return loss, {name: aux[name] for name in ("largest", "smallest", "largest_id")}


def test_batches_of_an_evaluation_are_joined(expected):
    step, state = sl.make_eval_step(numbers_only), start("data=4,fsdp=2")
    parts = [{k: v[i : i + 8] for k, v in BATCH.items()} for i in (8, 0)]
    found = evaluate(step, state, parts)
    check(found, {name: expected[name] for name in ("largest", "smallest", "largest_id")})
    with pytest.raises(ModelError, match=r"arrays: .*histogram.*\n  Call the evaluation step"):
        evaluate(sl.make_eval_step(loss_fn), state, parts)


def test_outputs_of_an_evaluation_are_scored(expected):
    parts = [{k: v[i : i + 8] for k, v in BATCH.items()} for i in (8, 0)]

    def rows(model, batch):
        mean, metrics = loss_fn(model, batch)
        return mean, {name: metrics[name] for name in ("y", "id", "largest")}

    def score(outputs):
        check(outputs, {name: np.roll(expected[name], 8, axis=0) for name in ("y", "id")})
        return {"first": float(outputs["id"][0])}

    found = evaluate(sl.make_eval_step(rows), start("data=4,fsdp=2"), parts, score=score)
    assert found["first"] == 8.0
    check(found, {"largest": expected["largest"]})
    with pytest.raises(ModelError, match="arrays: histogram, of_features/max; evaluate"):
        evaluate(sl.make_eval_step(loss_fn), start("data=8"), parts, score=score)


def test_groups_that_train_apart(expected):
    local = sl.make_local_sgd(sl.make_train_step(loss_fn), sl.LocalSGDConfig(inner_steps=2))
    _, metrics = local(local.init(start("data=4,fsdp=2")), BATCH)
    names = ("largest", "smallest", "largest_id", "of_features/rows")
    found = group_means({name: metrics[name] for name in names})
    check(found, {name: expected[name] for name in names})
    check({"y": metrics["y"].value.reshape(ROWS, 8)}, {"y": expected["y"]})
    with pytest.raises(ModelError, match="the loss returns arrays: "):
        group_means(metrics)


@pytest.mark.mesh
def test_groups_of_unequal_shares():
    options = {"reduction": sl.ReductionConfig(group_microbatches=(3, 1))}
    state = start("data=2,fsdp=4")
    _, metrics = sl.make_train_step(numbers_only, **options)(state, BATCH)
    _, whole = sl.make_train_step(numbers_only)(start("data=2,fsdp=4"), BATCH)
    np.testing.assert_allclose(metrics["largest"], whole["largest"], rtol=1e-5)
    assert float(metrics["largest_id"]) == ROWS - 1
    step = sl.make_train_step(loss_fn, **options)
    with pytest.raises(ModelError, match=r"outputs, but groups .*\n  Give every group the same"):
        step(start("data=2,fsdp=4"), BATCH)


def faulty(aux):
    state = start("data=8")
    return sl.make_train_step(lambda model, batch: (jnp.mean(model(batch["x"])), aux(batch)))(
        state, BATCH
    )


@pytest.mark.parametrize(
    ("aux", "text"),
    [
        (lambda batch: {"a": {"x": 1.0}, "a/x": 2.0}, "'a/x' twice, .*\n  Rename one"),
        (lambda batch: {"text": "none"}, "'text' as str, .*\n  Return a scalar or a Mean"),
        (lambda batch: {"logits": batch["x"]}, r"'logits' of shape \(16, 8\).\n  Reduce it"),
        (lambda batch: {"features": sl.Output(jnp.ones(8))}, "'features' .* 16 rows .*\n  Return"),
        (lambda batch: {"loss": {"grad": 1.0}, "grad_norm": 1.0}, "'grad_norm', .*\n  Rename it"),
    ],
    ids=["same name", "text", "rows", "rows of another batch", "reserved"],
)
def test_what_a_loss_may_not_report(aux, text):
    with pytest.raises(ModelError, match=text):
        faulty(aux)


def test_a_loss_that_has_no_gradient():
    step = sl.make_train_step(lambda model, batch: sl.Max(jnp.max(model(batch["x"]))))
    with pytest.raises(ModelError, match=r"a Max, which is not differentiated.\n  Return a scalar"):
        step(start("data=8"), BATCH)


def test_a_loss_of_integers():
    def count(model, batch):
        return jnp.sum(model(batch["x"]) > 0)

    state = start("data=8")
    with pytest.raises(ModelError, match=r"int32, which has no gradient.\n  Return a float"):
        sl.make_train_step(count)(state, BATCH)
    assert sl.make_eval_step(count)(state, BATCH)["loss"].value >= 0
