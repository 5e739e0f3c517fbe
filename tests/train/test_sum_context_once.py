"""Gradients are summed over `context` once a step by default, where the numbers stay the same."""

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
from shardlib.nn.attention import attend, plan_context, positions, zigzag
from shardlib.registry import DataSpec
from shardlib.sharding.manual import NESTS_IN_MESH_ORDER_ONLY
from shardlib.train.local_sgd.outer import LocalSGDConfig, group_means, make_local_sgd
from shardlib_models.transformer import loss as transformer_loss
from shardlib_models.transformer import make
from shardlib_models.transformer_config import TransformerConfig

ROWS, LENGTH, WIDTH, HEADS = 16, 256, 16, 4
RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.standard_normal((ROWS, LENGTH, WIDTH), dtype=np.float32),
    "label": RANDOM.integers(0, WIDTH, (ROWS, LENGTH)).astype(np.int32),
    "document": np.sort(RANDOM.integers(0, 3, (ROWS, LENGTH)), 1).astype(np.int32),
    # Positions, rows and microbatches weigh unequally.
    "weight": RANDOM.uniform(size=(ROWS, LENGTH)).astype(np.float32),
    "row_weight": np.arange(1, ROWS + 1, dtype=np.float32),
}
AXES = {"x": ("batch", "length", None)} | dict.fromkeys(
    ("label", "document", "weight"), ("batch", "length")
)
MESHES = ("data=2,context=2", "context=2", "fsdp=2,context=2", "data=2,fsdp=2,context=2")
if NESTS_IN_MESH_ORDER_ONLY:
    MESHES = MESHES[:2]


class Attentive(nnx.Module):
    """One layer of attention, with what a test adds before it."""

    def __init__(self, rngs, how="ring", before=lambda x: x):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        make = functools.partial(nnx.Linear, use_bias=False, kernel_init=kernel, rngs=rngs)
        self.how, self.before = how, before
        self.up, self.down = make(WIDTH, 3 * HEADS * 8), make(HEADS * 8, WIDTH)

    def __call__(self, batch):
        length = batch["x"].shape[1]
        how: Any = self.how
        plan = plan_context(length, HEADS, HEADS, context=how)
        if plan.order == "zigzag":
            batch = {k: zigzag(x) if x.ndim > 1 else x for k, x in batch.items()}
        at = positions(length, plan.order).astype(jnp.float32)
        x = batch["x"] + jnp.cos(at / 10)[:, :, None]
        x = sl.constrain(self.before(x), "batch", "length", None)
        x = sl.constrain(self.up(x), "batch", "length", "mlp")
        query, key, value = jnp.split(x.reshape(*x.shape[:2], 3 * HEADS, 8), 3, axis=2)
        document = batch["document"]
        y = attend(query, key, value, segment_ids=document, context=how, order=plan.order)
        y = sl.constrain(y.reshape(*x.shape[:2], -1), "batch", "length", "mlp")
        return self.down(y), batch


def errors(model, batch):
    logits, batch = model(batch)
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["label"], WIDTH)), batch


def weighted(model, batch, rng):
    error, batch = errors(model, batch)
    total = jnp.sum(error * batch["weight"])
    return Mean(total, jnp.sum(batch["weight"])), {
        "by_row": Mean(total, jnp.sum(batch["row_weight"])),
        "error": jnp.mean(error),
        "counts": Sum(jnp.sum(jax.nn.one_hot(batch["label"], WIDTH), (0, 1))),
        "worst": Max(jnp.max(error)),
    }


def state_on(mesh, how="ring", before: Any = lambda x: x):
    sizes = [int(axis.split("=")[1]) for axis in mesh.split(",")]
    mesh = sl.make_mesh(mesh, devices=jax.devices()[: int(np.prod(sizes))])
    with sl.use(mesh, sl.rules.STANDARD):
        return sl.init_state(
            lambda rngs: Attentive(rngs, how, before), optax.adam(0.1), seed=0, precision="f32"
        )


def step_of(loss, **options):
    return sl.make_train_step(loss, **{"microbatches": 4, "batch_axes": AXES, **options})


@functools.cache
def on_one_device():
    return jax.device_get(step_of(weighted)(state_on("data=1"), BATCH))


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "how"),
    [*((mesh, "gather") for mesh in MESHES), (MESHES[0], "ring"), (MESHES[0], "ulysses")],
)
def test_loss_gradients_and_optimizer_state_equal_one_device(mesh, how):
    step, state = step_of(weighted), state_on(mesh, how)
    assert "over context once a step" in str(step.gradient_sums(state, BATCH))
    program = step.lower(state, BATCH).compile()
    found = collectives(program, state.definition.scope.mesh)
    (summed,) = (
        c
        for c in found
        if c.kind == "all-reduce" and "context" in (c.mesh_axes or ()) and c.bytes > 256
    )
    assert (summed.count, summed.in_loop) == (1, False)
    params = [x.addressable_shards[0].data for x in jax.tree.leaves(state.params)]
    assert summed.bytes <= sum(x.nbytes for x in params) + 256
    state, metrics = jax.device_get(step(state, BATCH))
    one, expected = on_one_device()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5),
        (state.params, state.opt_state, metrics),
        (one.params, one.opt_state, expected),
    )


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("reduction", "rtol"), [({"dtype": "f32", "outer": 2}, 1e-4), ({"dtype": "bf16"}, 0.1)]
)
def test_hops_along_data_also_sum_over_context_once(reduction, rtol):
    step = step_of(weighted, reduction=sl.ReductionConfig(**reduction))
    state = state_on("data=4,context=2", "gather")
    assert "over context once a step" in str(step.gradient_sums(state, BATCH))
    found = collectives(step.lower(state, BATCH).compile(), state.definition.scope.mesh)
    sums = [c for c in found if "context" in (c.mesh_axes or ()) and c.phase == "optimizer"]
    assert sums
    assert not any(c.in_loop for c in sums)
    _, metrics = jax.device_get(step(state, BATCH))
    _, expected = on_one_device()
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=rtol)


def returned(model, batch, rng):
    error, batch = errors(model, batch)
    return jnp.mean(error), {"errors": Output(error)}


def pooled(model, batch, rng):
    error, batch = errors(model, batch)
    return jnp.mean(jnp.square(jnp.mean(error, 1)))


def shifted(x):
    return x + jnp.roll(x, 1, axis=1)


def numbered(x):
    """Positions that are wrong where a device sees a part of the row."""
    return x * jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None]


def own_attention(x):
    return jax.nn.softmax(x @ jnp.swapaxes(x, 1, 2), axis=-1) @ x


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("loss", "before", "why"),
    [
        (returned, None, "the loss returns outputs"),
        (pooled, None, "a sum over positions enters"),
        (weighted, shifted, "the loss computes fewer positions in another way"),
        (weighted, numbered, "positions of a row may meet in iota"),
        (weighted, own_attention, "positions of a row may meet in dot_general"),
    ],
)
def test_other_losses_are_summed_in_each_microbatch(loss, before, why):
    state = state_on("data=2,context=2", "gather", before or (lambda x: x))
    sums = step_of(loss).gradient_sums(state, BATCH)
    assert sums.reduction is None or sums.reduction.context is None
    assert f"over context in each microbatch: {why}" in str(sums)


@pytest.mark.mesh
def test_groups_that_train_on_their_own_sum_in_each_microbatch():
    local = make_local_sgd(step_of(weighted), LocalSGDConfig(inner_steps=1))
    found, expected = (
        group_means({"loss": local(local.init(state_on(mesh)), BATCH)[1]["loss"]})
        for mesh in ("data=2,context=2", "data=2")
    )
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("mesh", "options", "why"),
    [
        ("context=2", {"microbatches": 1}, "over context by the compiler"),
        (
            "data=2,context=2",
            {"reduction": sl.ReductionConfig(dtype="compiler")},
            "summed over data by the compiler: train.reduction is set",
        ),
        ("context=2", {"batch_axes": {}}, "context does not split the positions alone"),
    ],
)
def test_where_the_mesh_or_the_options_decide(mesh, options, why):
    sums = step_of(weighted, **options).gradient_sums(state_on(mesh, "gather"), BATCH)
    assert why in str(sums)


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("how", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_transformer_equals_one_device(mesh, how):
    names = ("tokens", "targets", "segment_ids", "positions")
    rows = {name: RANDOM.integers(0, 64, (16, 256)).astype(np.int32) for name in names}
    rows["segment_ids"] = np.sort(rows["segment_ids"] % 3, 1)[:, ::-1].copy()
    batch = {**rows, "num_bytes": RANDOM.integers(200, 900, 16).astype(np.int32)}
    config = TransformerConfig(
        num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, sinks=True,
        remat="full", loss_chunks=2, context=how,
    )  # fmt: skip

    def trained(mesh):
        sizes = [int(axis.split("=")[1]) for axis in mesh.split(",")]
        mesh = sl.make_mesh(mesh, devices=jax.devices()[: int(np.prod(sizes))])
        with sl.use(mesh, sl.rules.STANDARD):
            state = sl.init_state(
                lambda rngs: make(config, DataSpec(64, 256), rngs), optax.adam(1e-2), seed=0
            )
        step = step_of(
            functools.partial(transformer_loss, train=True),
            batch_axes=dict.fromkeys(names, ("batch", "length")),
        )
        if mesh.size > 1:
            assert "over context once a step" in str(step.gradient_sums(state, batch))
        state, metrics = step(state, batch)
        return jax.device_get((state.opt_state, metrics))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6),
        trained(mesh),
        trained("data=1"),
    )
