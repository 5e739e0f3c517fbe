"""Groups that train apart: one device's arithmetic on every mesh, and silence between groups."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.errors import ConfigError, MeshError, ModelError, RuleError
from shardlib.losses import Mean
from shardlib.train.local_sgd.outer import LocalSGDConfig, group_means, make_local_sgd
from shardlib.train.reduce.reduction import ReductionConfig

_RANDOM = np.random.default_rng(0)
BATCHES = [
    {
        "x": _RANDOM.standard_normal((16, 16), dtype=np.float32),
        "y": _RANDOM.standard_normal((16, 16), dtype=np.float32),
    }
    for _ in range(5)
]
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


class MLP(nnx.Module):
    def __init__(self, rngs):
        def kernel(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.up = nnx.Linear(16, 32, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=kernel("mlp", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        hidden = nnx.tanh(self.up(sl.constrain(x, "batch", None)))
        return self.down(self.dropout(sl.constrain(hidden, "batch", "mlp")))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.norm(x)


def loss_fn(model, batch, rng):
    error = jnp.square(model(batch["x"]) - batch["y"])
    return Mean(jnp.sum(error), jnp.float32(error.shape[0]))


def without_dropout(model, batch, rng):
    model.eval()
    return loss_fn(model, batch, rng)


def start(mesh, num_devices=8, optimizer=ADAM, make=MLP, rules=sl.rules.STANDARD, **kwargs):
    with sl.use(sl.make_mesh(mesh, devices=jax.devices()[:num_devices]), rules):
        return sl.init_state(make, optimizer, seed=0, **kwargs)


def train(local, state, batches):
    groups, losses = local.init(state), []
    for batch in batches:
        groups, metrics = local(groups, batch)
        losses.append(group_means(metrics)["loss"])
    return groups, losses


def run(mesh, num_devices, config, groups=None):
    step = sl.make_train_step(loss_fn, microbatches=2)
    local = make_local_sgd(step, dataclasses.replace(config, groups=groups))
    groups, losses = train(local, start(mesh, num_devices), BATCHES)
    return local, groups, losses


def assert_close(tree, other, atol):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("mesh", "num_devices", "groups"),
    [("data=2,fsdp=2,tensor=2", 8, 2), ("data=4,tensor=2", 8, 4), ("data=2,fsdp=2", 4, 4)],
)
def test_equal_to_one_device_that_trains_the_groups_in_turn(mesh, num_devices, groups):
    config = LocalSGDConfig(inner_steps=2)
    local, found, losses = run(mesh, num_devices, config, groups)
    alone, expected, expected_losses = run("data=1", 1, config, groups)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    # Five AdamW steps of 1e-2 each. A gradient differs in the last bits, and AdamW divides it by
    # its own size: 2**-24 of a step, times the cancellation in sums of 32 terms.
    assert_close(found.params, expected.params, 1e-6)
    assert_close(found.momentum, expected.momentum, 1e-6)
    assert_close(found.groups.params, expected.groups.params, 1e-6)
    assert int(found.step) == 5
    merged = local.merge(found)
    assert_close(merged.opt_state, alone.merge(expected).opt_state, 1e-6)
    kernel = found.groups.params["up"]["kernel"]
    names = [name for name in ("fsdp", "tensor") if name in mesh]
    assert kernel.sharding.spec[0] == "data"
    assert [x for x in kernel.sharding.spec[1:] if x] == names
    assert (
        merged.params["up"]["kernel"].sharding
        == start(mesh, num_devices).params["up"]["kernel"].sharding
    )


def test_agreeing_every_step_by_the_mean_is_data_parallel_sgd():
    optimizer = optax.sgd(0.05)
    config = LocalSGDConfig(
        inner_steps=1, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False
    )
    step = sl.make_train_step(without_dropout)
    state = start("data=4,tensor=2", optimizer=optimizer)
    groups, losses = train(make_local_sgd(step, config), state, BATCHES)
    expected_losses = []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        expected_losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_close(groups.params, state.params, 1e-6)


@pytest.mark.mesh
def test_the_outer_step_is_nesterov_momentum_on_the_mean_progress():
    config = LocalSGDConfig(inner_steps=2)
    step = sl.make_train_step(without_dropout)
    state = start("data=2", 2, optax.sgd(0.05))
    before = jax.device_get(state.params)
    groups, _ = train(make_local_sgd(step, config), state, BATCHES[:4])

    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    agreed, outer = before, optimizer.init(before)
    for at in (0, 2):
        ends = []
        for half in (slice(0, 8), slice(8, 16)):
            own = start("data=1", 1, optax.sgd(0.05))
            placed = jax.tree.map(jnp.asarray, agreed)
            own = sl.TrainState(
                own.step, placed, own.model_state, own.opt_state, own.rng, own.definition
            )
            for batch in BATCHES[at : at + 2]:
                own, _ = step(own, {name: x[half] for name, x in batch.items()})
            ends.append(jax.device_get(own.params))
        progress = jax.tree.map(lambda x, a, b: x - (a + b) / 2, agreed, *ends)
        updates, outer = optimizer.update(progress, outer)
        agreed = jax.device_get(optax.apply_updates(agreed, updates))
    assert_close(groups.params, agreed, 1e-6)


@pytest.mark.mesh
def test_nothing_crosses_between_groups_before_they_agree():
    config = LocalSGDConfig(inner_steps=100, dtype="bf16")
    local = make_local_sgd(sl.make_train_step(loss_fn, microbatches=2), config)
    groups = local.init(start("data=2,fsdp=2,tensor=2"))
    report = sl.explain(local, groups, BATCHES[0])
    crossing = [c for c in report.collectives if c.mesh_axes is None or "data" in c.mesh_axes]
    agreeing = [c for c in crossing if "/cond/" in c.op_name]
    assert crossing == agreeing
    # All else of the step lies outside of the branch in which groups agree.
    assert any("/cond/" not in c.op_name for c in report.collectives)
    assert sorted((c.kind, c.shapes[0].split("[")[0]) for c in agreeing) == [
        ("all-gather", "u16"),
        ("all-to-all", "u16"),
    ]


@pytest.mark.mesh
def test_progress_in_bfloat16_is_rounded_twice():
    config = LocalSGDConfig(
        inner_steps=5, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False
    )
    rounded = dataclasses.replace(config, dtype="bf16")
    _, exact, _ = run("data=2,fsdp=2", 4, config)
    _, found, _ = run("data=2,fsdp=2", 4, rounded)
    first = jax.device_get(start("data=1", 1).params)
    moved = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), exact.params, first)
    # The progress of a group and their mean are rounded by 2**-8 each. Each of five AdamW steps
    # moves a parameter by 1e-2 at most.
    assert max(jax.tree.leaves(moved)) < 0.05
    assert_close(found.params, exact.params, 2 * 2.0**-8 * 0.05)
    differs = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), exact.params, found.params)
    assert max(jax.tree.leaves(differs)) > 0


@pytest.mark.mesh
def test_statistics_become_the_mean_over_groups():
    config = LocalSGDConfig(inner_steps=1)
    step = sl.make_train_step(loss_fn)
    local = make_local_sgd(step, config)
    groups, _ = train(local, start("data=2,tensor=2", 4, make=Normed), BATCHES[:1])
    x = BATCHES[0]["x"]
    # The running mean starts at 0 and keeps 0.99 of what it was.
    expected = 0.01 * (x[:8].mean(0) + x[8:].mean(0)) / 2
    for mean in groups.groups.model_state["norm"]["mean"]:
        np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-7)
    merged = local.merge(groups)
    assert int(merged.model_state["calls"]) == 1
    np.testing.assert_allclose(merged.model_state["norm"]["mean"], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.mesh
def test_an_abstract_state_gives_abstract_groups():
    config = LocalSGDConfig()
    local = make_local_sgd(sl.make_train_step(loss_fn), config)
    with sl.use(sl.make_mesh("data=2,fsdp=2,tensor=2"), sl.rules.STANDARD):
        abstract = local.init(sl.abstract_state(MLP, ADAM))
    found = local.init(start("data=2,fsdp=2,tensor=2"))
    for x, y in zip(jax.tree.leaves(abstract), jax.tree.leaves(found), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)


@pytest.mark.mesh
def test_what_cannot_be_shared_out_is_refused():
    step = sl.make_train_step(loss_fn, microbatches=3)
    state = start("data=2,tensor=4")
    with pytest.raises(
        MeshError, match=r"(?s)3 groups do not divide over the.*Use a multiple of 2"
    ):
        make_local_sgd(step, LocalSGDConfig(groups=3)).init(state)
    local = make_local_sgd(step, LocalSGDConfig())
    with pytest.raises(
        ModelError, match=r"(?s)the batch's x has shape \(16.*Choose a batch that is"
    ):
        local(local.init(state), {"x": np.zeros((16, 16), np.float32)})


def test_a_step_that_reduces_over_data_is_refused():
    step = sl.make_train_step(loss_fn, reduction=ReductionConfig(dtype="bf16"))
    with pytest.raises(
        ConfigError, match=r"(?s)local SGD does not sum gradients.*Leave reduction out;"
    ):
        make_local_sgd(step, LocalSGDConfig())


@pytest.mark.parametrize(
    ("rules", "offloads", "text"),
    [
        (
            sl.rules.STANDARD.override(embed="data"),
            False,
            "params: .* over data.*\n  Use rules",
        ),
        (sl.rules.STANDARD, True, "opt_state is in pinned_host .*\n  Leave train.offload_opt"),
    ],
    ids=["split", "offloaded"],
)
def test_states_that_groups_cannot_hold_are_refused(rules, offloads, text):
    with sl.use(sl.make_mesh("data=8"), rules):
        state = sl.abstract_state(MLP, ADAM)
    state = sl.offload_optimizer(state) if offloads else state
    with pytest.raises(RuleError, match=text):
        make_local_sgd(sl.make_train_step(loss_fn), LocalSGDConfig()).init(state)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner_steps": 0}, "inner_steps must be at least 1, not 0"),
        ({"outer_learning_rate": 0.0}, "outer_learning_rate must be positive, not 0.0"),
        ({"outer_momentum": 1.0}, "outer_momentum must lie in [0, 1), not 1.0"),
    ],
)
def test_configs_that_mean_nothing(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LocalSGDConfig(**values)


@pytest.mark.mesh
def test_groups_with_more_to_count_weigh_more():
    def weighted(model, batch, rng):
        error = jnp.square(model(batch["x"]) - batch["y"]) * batch["w"][:, None]
        return Mean(jnp.sum(error), jnp.sum(batch["w"]))

    weights = np.repeat(np.float32([1, 3]), 8)
    state = start("data=2,tensor=4", optimizer=optax.sgd(0.0))
    local = make_local_sgd(sl.make_train_step(weighted), LocalSGDConfig())
    _, metrics = local(local.init(state), {**BATCHES[0], "w": weights})
    assert metrics["loss"].weight.tolist() == [8.0, 24.0]
    first, second = map(float, metrics["loss"].value)
    assert group_means(metrics)["loss"] == pytest.approx((first + 3 * second) / 4, rel=1e-6)
