"""Gradients are summed over `data` once a step by default, where the numbers stay the same."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.explain.analysis.collectives import collectives
from shardlib.losses.aggregate import Max, Mean, Output, Sum

RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.standard_normal((32, 16), dtype=np.float32),
    "label": RANDOM.integers(0, 16, 32).astype(np.int32),
    # Groups and microbatches weigh unequally.
    "weight": np.arange(32, dtype=np.float32),
}
FSDP_FIRST = "fsdp first"
MESHES = ("data=2,fsdp=2,tensor=2", "data=4,fsdp=2", "data=8")


def kernel(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class MLP(nnx.Module):
    """Two layers with what a test adds between them."""

    def __init__(self, rngs, between=lambda rngs: lambda x: x):
        self.up = nnx.Linear(16, 32, use_bias=False, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.between = between(rngs)
        self.down = nnx.Linear(
            32, 16, use_bias=False, kernel_init=kernel("mlp", "embed"), rngs=rngs
        )

    def __call__(self, x):
        hidden = nnx.tanh(self.up(sl.constrain(x, "batch", None)))
        return self.down(self.between(sl.constrain(hidden, "batch", "mlp")))


def of_logits(logits, batch):
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["label"], 16))


def errors(model, batch):
    return of_logits(model(batch["x"]), batch)


def weighted(model, batch, rng):
    logits = model(batch["x"])
    error = of_logits(logits, batch)
    right = jnp.argmax(logits, 1) == batch["label"]
    return Mean(jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"])), {
        "right": jnp.mean(right.astype(jnp.float32)),
        "counts": Sum(jnp.bincount(batch["label"], length=16)),
        "worst": Max(jnp.max(error)),
        "errors": Output(error),
    }


def mean(model, batch, rng):
    penalty = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return jnp.mean(errors(model, batch)) + 0.01 * penalty


def state_on(mesh, make: Any = MLP, rules=sl.rules.STANDARD, devices=8):
    if mesh == FSDP_FIRST:
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((2, 4), ("fsdp", "data"), axis_types=auto)
    else:
        mesh = sl.make_mesh(mesh, devices=jax.devices()[:devices])
    with sl.use(mesh, rules):
        return sl.init_state(make, optax.adam(0.1), seed=0)


@functools.cache
def on_one_device(loss):
    step = sl.make_train_step(loss, microbatches=2)
    return jax.device_get(step(state_on("data=1", devices=1), BATCH))


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("loss", [weighted, mean])
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_gradients_and_optimizer_state_equal_one_device(mesh, loss):
    step, state = sl.make_train_step(loss, microbatches=2), state_on(mesh)
    assert "once a step" in str(step.gradient_sums(state, BATCH))
    program = step.lower(state, BATCH).compile()
    summed = [
        c
        for c in collectives(program, state.definition.scope.mesh)
        if "data" in (c.mesh_axes or ()) and c.bytes > 256
    ]
    assert {c.kind for c in summed} == {"all-reduce"}
    assert not any(c.in_loop for c in summed)
    params = [x.addressable_shards[0].data for x in jax.tree.leaves(state.params)]
    assert sum(c.bytes * c.count for c in summed) <= sum(x.nbytes for x in params) + 256
    state, metrics = jax.device_get(step(state, BATCH))
    one, expected = on_one_device(loss)
    # Adam divides each gradient by its magnitude, so that its rounding counts in full.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        (state.params, state.opt_state, metrics),
        (one.params, one.opt_state, expected),
    )


def contrastive(model, batch, rng):
    vectors = model(batch["x"])
    same = jnp.arange(vectors.shape[0])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(vectors @ batch["x"].T, same))


def noisy(model, batch, rng):
    noise = jax.random.normal(rng, batch["x"].shape)
    return jnp.mean(errors(model, {**batch, "x": batch["x"] + noise}))


def balanced(model, batch, rng):
    """The balance loss of a mixture of experts: two means over a microbatch, multiplied."""
    chosen = jax.nn.softmax(model(batch["x"]))
    share = jnp.mean(jax.nn.one_hot(jnp.argmax(chosen, 1), 16), 0)
    return jnp.mean(errors(model, batch)) + jnp.sum(share * jnp.mean(chosen, 0))


def own_weight(model, batch, rng):
    """A mean over the weights of each microbatch, whatever the others weigh."""
    error = errors(model, batch) * batch["weight"]
    return jnp.sum(error) / jnp.sum(batch["weight"])


def summed(model, batch, rng):
    return jnp.sum(errors(model, batch))


def highest(model, batch, rng):
    error = errors(model, batch)
    return jnp.mean(error), {"highest": jnp.max(error)}


def applied(model, batch, rng):
    rows = len(batch["x"])
    pairs = jnp.stack([batch["weight"], batch["weight"]], -1)
    return jnp.mean(errors(model, batch) * pairs.at[:, 0].apply(lambda x: x * rows)[:, 0])


def wrapping(model, batch, rng):
    count = jnp.sum(jnp.full(len(batch["x"]), 30, jnp.uint8), dtype=jnp.uint8)
    return Mean(jnp.sum(errors(model, batch)), count.astype(jnp.float32))


def normed(rngs):
    return nnx.BatchNorm(32, rngs=rngs)


def frozen(rngs):
    """Batch statistics that are not kept."""
    return lambda x: (x - jnp.mean(x, 0, keepdims=True)) / jnp.std(x, 0, keepdims=True)


def dropped(rngs):
    return nnx.Dropout(0.5, rngs=rngs)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("loss", "between", "why"),
    [
        (contrastive, None, "rows of the batch may meet in dot_general at"),
        (noisy, None, "the loss draws random numbers at"),
        (mean, dropped, "the loss draws random numbers at"),
        (mean, normed, "the model updates its own state"),
        (mean, frozen, "rows of the batch may meet in"),
        (balanced, None, "a sum over rows enters"),
        (own_weight, None, "a sum over rows enters div at"),
        (applied, None, "computes fewer rows in another way"),
        (wrapping, None, "rows of the batch may meet in reduce_sum at"),
        (summed, None, "the loss is neither a mean over rows, nor"),
        (highest, None, "the metric 'highest' is not computed row by row"),
    ],
)
def test_other_losses_keep_the_numbers_of_one_device(loss, between, why):
    make = MLP if between is None else functools.partial(MLP, between=between)
    step, state = sl.make_train_step(loss, microbatches=2), state_on("data=4,fsdp=2", make)
    sums = step.gradient_sums(state, BATCH)
    assert sums.reduction is None
    assert why in str(sums)
    _, expected = sl.make_train_step(loss, microbatches=2)(
        state_on("data=1", make, devices=1), BATCH
    )
    _, found = step(state, BATCH)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4)


OVER_DATA = sl.rules.STANDARD.override(embed="data")
BY_FSDP = sl.rules.STANDARD.override(activations={"batch": "fsdp"})


@pytest.mark.parametrize(
    ("mesh", "rules", "options", "why"),
    [
        ("data=8", sl.rules.STANDARD, {"microbatches": 1}, "the step has one microbatch"),
        ("fsdp=8", sl.rules.STANDARD, {}, "not summed over data"),
        (FSDP_FIRST, sl.rules.STANDARD, {}, "data comes after fsdp in the mesh"),
        ("data=8", OVER_DATA, {}, "parameters are split over data"),
        ("data=4,fsdp=2", BY_FSDP, {}, "data does not split the rows"),
        (
            "data=8",
            sl.rules.STANDARD,
            {"reduction": sl.ReductionConfig(dtype="bf16")},
            "once a step: train.reduction is set",
        ),
        (
            "data=8",
            sl.rules.STANDARD,
            {"reduction": sl.ReductionConfig(dtype="compiler")},
            "by the compiler: train.reduction is set",
        ),
    ],
)
def test_where_the_mesh_or_the_options_decide(mesh, rules, options, why):
    step = sl.make_train_step(mean, **{"microbatches": 2, **options})
    assert why in str(step.gradient_sums(state_on(mesh, rules=rules), BATCH))


def looked_up(model, batch, rng):
    logits = model(batch["x"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


def test_a_gather_that_xla_may_not_partition_in_groups():
    step = sl.make_train_step(looked_up, microbatches=2)
    assert "once a step" in str(step.gradient_sums(state_on("data=4,fsdp=2"), BATCH))
    sums = step.gradient_sums(state_on("data=2,fsdp=2,tensor=2"), BATCH)
    assert "XLA cannot partition every gather in a group" in str(sums)
