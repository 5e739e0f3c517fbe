"""Gradients summed once a step: the same mean on every mesh, and what travels for it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.explain.analysis.collectives import collectives
from shardlib.functional.precision import precision
from shardlib.losses import Mean
from shardlib.train.gradients import LossArguments, PartLoss, accumulate_gradients, part_key
from shardlib.train.reduce.reduction import (
    ReductionConfig,
    groups_apart,
    plan_reduction,
    reduced_gradients,
)

ROWS = 48
_RANDOM = np.random.default_rng(0)
BATCH = {
    "x": _RANDOM.standard_normal((ROWS, 16), dtype=np.float32),
    "y": _RANDOM.standard_normal((ROWS, 16), dtype=np.float32),
    # Rows weigh from 0 to 47, so that groups and microbatches weigh unequally.
    "weight": np.arange(ROWS, dtype=np.float32),
}
# Splits gradients and optimizer state over `data`: stage 2 of ZeRO across the groups.
OVER_DATA = sl.rules.STANDARD.override(embed="data")
ZERO_OVER_DATA = dataclasses.replace(sl.rules.ZERO1, gradients=OVER_DATA, opt_state=OVER_DATA)
ROUNDING = 2.0**-8
"""Relative error of rounding to bfloat16, whose significand has 8 bits."""


class MLP(nnx.Module):
    def __init__(self, rngs):
        def kernel(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        bias = nnx.with_partitioning(nnx.initializers.zeros_init(), ("mlp",))
        self.up = nnx.Linear(16, 32, kernel_init=kernel("embed", "mlp"), bias_init=bias, rngs=rngs)
        self.down = nnx.Linear(
            32, 16, use_bias=False, kernel_init=kernel("mlp", "embed"), rngs=rngs
        )
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.tanh(self.up(sl.constrain(x, "batch", None)))
        return self.down(self.dropout(sl.constrain(hidden, "batch", "mlp")))


def loss_fn(model, batch, rng):
    error = jnp.sum(jnp.square(model(batch["x"]) - batch["y"]), axis=1)
    weight = jnp.sum(batch["weight"])
    return Mean(jnp.sum(error * batch["weight"]), weight), {
        "rows": Mean(weight, jnp.float32(error.size))
    }


def setting(mesh, num_devices=8, rules=sl.rules.STANDARD):
    with sl.use(sl.make_mesh(mesh, devices=jax.devices()[:num_devices]), rules):
        state = sl.init_state(MLP, optax.sgd(0.1), seed=0)
    return state, PartLoss(state.definition, loss_fn, precision("f32"))


def reduced(mesh, config, microbatches=1, rules=sl.rules.STANDARD):
    """Returns the gradients, what is sent for them, and how many microbatches each group took."""
    state, loss = setting(mesh, rules=rules)
    scope = state.definition.scope
    reduction = plan_reduction(
        config, scope.mesh, microbatches=microbatches, params=state.definition.params
    )
    inner = functools.partial(accumulate_gradients, microbatches=reduction.inner_microbatches)

    def compute(params, batch, key):
        with sl.use(scope.mesh, scope.rules):
            groups = functools.partial(groups_apart, inner)
            arguments = LossArguments(params, {}, batch, key)
            return reduced_gradients(groups, loss, arguments, reduction)

    arguments = state.params, reduction.arrange(BATCH), jax.random.key(3)
    compiled = jax.jit(compute).lower(*arguments).compile()
    hops = reduction.hops
    axes = {"outer": hops.outer, "inner": hops.inner, **dict(scope.mesh.shape)}
    del axes["data"]
    return jax.jit(compute)(*arguments), collectives(compiled, axes), reduction.counts


@functools.cache
def parts_on_one_device(counts):
    """Returns gradients and sums of each microbatch, those of the first group first."""
    state, loss = setting("data=1", 1)
    rows, size, first = [], ROWS // sum(counts), 0
    for count in counts:
        block = first + np.arange(count * size).reshape(size, count)
        rows += [block[:, i] for i in range(count)]
        first += count * size

    @jax.jit
    def one(part, key):
        with sl.use(state.definition.scope.mesh, state.definition.scope.rules):
            return loss.gradients(LossArguments(state.params, {}, part, key))[:2]

    return [
        one(jax.tree.map(lambda x, r=r: x[r], BATCH), part_key(jax.random.key(3), i))
        for i, r in enumerate(rows)
    ]


def expected(counts):
    return jax.device_get(functools.reduce(_plus, parts_on_one_device(counts)))


def _plus(a, b):
    return jax.tree.map(jnp.add, a, b)


def group_magnitude(counts):
    """Returns the sum over groups of the magnitudes of their gradients."""
    parts, first, total = parts_on_one_device(counts), 0, None
    for count in counts:
        group = functools.reduce(_plus, parts[first : first + count])[0]
        size = jax.tree.map(jnp.abs, group)
        total, first = size if total is None else _plus(total, size), first + count
    return jax.device_get(total)


def assert_equal(found, counts):
    # Sums of at most 48 products, added in another order: a few roundings of 2**-24 of terms that
    # are up to ten times the result.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * np.max(np.abs(b))),
        jax.device_get((found.grads, found.sums)),
        expected(counts),
    )


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "config", "microbatches"),
    [
        ("data=8", ReductionConfig(dtype="f32"), 2),
        ("data=2x4", ReductionConfig(outer=2), 2),
        ("data=2,fsdp=2,tensor=2", ReductionConfig(dtype="f32"), 3),
    ],
)
def test_equal_to_one_device_with_the_microbatches_of_all_groups(mesh, config, microbatches):
    found, _, counts = reduced(mesh, config, microbatches)
    assert_equal(found, counts)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "config", "microbatches", "counts"),
    [
        ("data=2,fsdp=2,tensor=2", ReductionConfig(group_microbatches=(1, 3)), 1, (1, 3)),
        ("data=4,tensor=2", ReductionConfig(group_seconds=(1.0, 1.0, 2.0, 4.0)), 3, (5, 4, 2, 1)),
        ("data=4,fsdp=2", ReductionConfig(group_microbatches=(2, 2, 2, 2)), 1, (2, 2, 2, 2)),
    ],
)
def test_groups_of_unequal_speed_give_the_mean_of_one_device(mesh, config, microbatches, counts):
    found, _, taken = reduced(mesh, config, microbatches)
    assert taken == counts
    assert_equal(found, counts)


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("mesh", "config", "roundings"),
    [
        ("data=8", ReductionConfig(dtype="bf16"), 2),
        ("data=2,fsdp=2,tensor=2", ReductionConfig(dtype="bf16"), 2),
        # Within a slice, between slices, and the result.
        ("data=2x4", ReductionConfig(dtype="bf16", outer=2), 3),
        ("data=2x4", ReductionConfig(compress_dcn=True, outer=2), 2),
    ],
)
def test_bfloat16_rounds_each_contribution_once_a_hop(mesh, config, roundings):
    found, _, counts = reduced(mesh, config)
    exact, _ = expected(counts)
    bound = jax.tree.map(
        lambda size: ((1 + ROUNDING) ** roundings - 1 + 1e-6) * size, group_magnitude(counts)
    )
    grads = jax.device_get(found.grads)
    jax.tree.map(
        lambda a, b, most: np.testing.assert_array_less(np.abs(a - b), most + 1e-12),
        grads,
        exact,
        bound,
    )
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, a.astype(jnp.bfloat16)), grads)
    # What the gradients are divided by is not rounded.
    assert float(found.sums["loss"].weight) == BATCH["weight"].sum()


def sent(found, *axes):
    """Returns kind and dtype of what crosses these axes, scalars apart."""
    return [
        (c.kind, {shape.split("[")[0] for shape in c.shapes})
        for c in found
        if set(c.mesh_axes or ()) & set(axes) and c.bytes > 64
    ]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("config", "within", "between"),
    [
        (
            ReductionConfig(outer=2),
            [("reduce-scatter", {"f32"}), ("all-gather", {"f32"})],
            [("reduce-scatter", {"f32"}), ("all-gather", {"f32"})],
        ),
        (
            ReductionConfig(outer=2, compress_dcn=True),
            [("reduce-scatter", {"f32"}), ("all-gather", {"u16"})],
            [("all-to-all", {"u16"}), ("all-gather", {"u16"})],
        ),
        (
            ReductionConfig(outer=2, dtype="bf16"),
            [("all-to-all", {"u16"}), ("all-gather", {"u16"})],
            [("all-to-all", {"u16"}), ("all-gather", {"u16"})],
        ),
    ],
)
def test_what_travels_once_a_step(config, within, between, microbatches):
    _, found, _ = reduced("data=2x2,tensor=2", config, microbatches)
    assert sorted(map(str, sent(found, "inner"))) == sorted(map(str, within))
    assert sorted(map(str, sent(found, "outer"))) == sorted(map(str, between))
    crossing = [c for c in found if set(c.mesh_axes or ()) & {"inner", "outer"}]
    assert [c.count for c in crossing] == [1] * len(crossing)
    assert not any(c.in_loop for c in crossing)
    # Between slices each device sends one half of what it holds, in parts for two: the whole of
    # the weights is half as many numbers again on each of two devices along `tensor`.
    numbers = (16 * 32 + 32 + 32 * 16) // 2
    bytes_each = 2 if "u16" in str(between) else 4
    gathered = [c.bytes for c in found if c.kind == "all-gather" and "outer" in (c.mesh_axes or ())]
    assert gathered == [numbers // 2 * bytes_each]


def test_one_sum_in_float32_where_all_links_are_alike():
    _, found, _ = reduced("data=4,tensor=2", ReductionConfig(dtype="f32"), 3)
    assert sent(found, "inner") == [("all-reduce", {"f32"})]


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("mesh", ["data=8", "data=2x2,tensor=2"])
def test_gradients_split_over_data_are_not_gathered(mesh, dtype):
    outer = 2 if "x" in mesh else None
    config = ReductionConfig(dtype=dtype, outer=outer)
    found, crossing, counts = reduced(mesh, config, 2, ZERO_OVER_DATA)
    kernel = found.grads["up"]["kernel"]
    assert kernel.sharding.spec[0] == "data"
    gathered = [c for c in crossing if c.kind == "all-gather"]
    # The bias, which the rules split over no axis of the groups.
    assert all(c.bytes <= 32 * 4 for c in gathered)
    if dtype == "f32":
        assert_equal(found, counts)
    else:
        exact = expected(counts)[0]["up"]["kernel"]
        size = group_magnitude(counts)["up"]["kernel"]
        most = ((1 + ROUNDING) ** 2 - 1) * size
        np.testing.assert_array_less(np.abs(kernel - exact), most)


@pytest.mark.mesh
def test_gradients_split_over_data_and_another_axis():
    both = sl.rules.STANDARD.override(embed="data+fsdp")
    rules = dataclasses.replace(sl.rules.ZERO1, gradients=both, opt_state=both)
    found, _, counts = reduced("data=2,fsdp=2,tensor=2", ReductionConfig(dtype="f32"), 2, rules)
    assert found.grads["up"]["kernel"].sharding.spec[0] == ("data", "fsdp")
    assert_equal(found, counts)


def test_the_compiler_decides_where_nothing_is_configured_or_one_group_is_all():
    mesh = sl.make_mesh("data=8")
    assert plan_reduction(ReductionConfig(), mesh, microbatches=4) is None
    assert plan_reduction(ReductionConfig(dtype="f32"), sl.make_mesh("fsdp=8")) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"outer": 0}, "outer must be at least 1, or null, not 0"),
        ({"group_microbatches": (2, 0)}, r"group_microbatches .* at least 1, not \[2, 0\]"),
        ({"group_seconds": (1.0, -1.0)}, "group_seconds must be positive"),
        ({"dtype": "compiler", "outer": 2}, "compiler, which allows no other setting"),
        ({"group_microbatches": (1,), "group_seconds": (1.0,)}, "exclude each other: give one"),
    ],
)
def test_configs_that_mean_nothing(values, message):
    with pytest.raises(ValueError, match=message):
        ReductionConfig(**values)
