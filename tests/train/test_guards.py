"""Updates refused on the devices: what keeps its bits, and what goes on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from guarded import CASES, ROWS, SPIKES, Case, bad_batches, good_batch

from shardlib.checkpoint import CheckpointConfig, RunCheckpoints
from shardlib.checkpoint.tree import flatten
from shardlib.errors import ModelError
from shardlib.optim.build import OptimizerConfig, build_optimizer
from shardlib.train.guards import GuardsConfig, SpikeConfig, robust_score
from shardlib.train.local_sgd.outer import LocalSGDConfig, group_means, make_local_sgd
from shardlib.train.state import materialize


def decayed_adamw():
    """AdamW whose moments, decay and schedule all move at any update, even one of zeros."""
    config = OptimizerConfig(
        learning_rate=1e-2, warmup_steps=8, weight_decay=0.1, no_decay=(), ema_decay=0.9
    )
    return build_optimizer(config, steps=32, global_batch=ROWS)


def trained_bits(state):
    """The bytes of everything that an update may change, by path."""
    parts = (state.params, state.model_state, state.opt_state, state.spike_window)
    leaves = flatten(dict(zip("pmow", parts, strict=True)))
    return {path: np.asarray(leaf).tobytes() for path, leaf in leaves.items()}


def marked(name):
    return pytest.param(name, marks=pytest.mark.soak if name in SOAK else ())


SOAK = {"fsdp", "zero2", "reduced in bf16"}


@pytest.mark.rest("mesh")
@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_a_refused_update_leaves_every_bit_and_the_next_is_as_if_it_had_not_been(
    name, compilations
):
    case, optimizer = CASES[name], decayed_adamw()
    abstract = case.abstract(optimizer.transform)
    step = case.make_step(schedule=optimizer.schedule)
    state, metrics = step(materialize(abstract), good_batch(1))
    assert float(metrics["skipped"]) == 0
    before, rates = trained_bits(state), [float(metrics["learning_rate"])]
    for number, (fault, batch) in enumerate(bad_batches().items(), start=2):
        state, metrics = step(state, batch)
        assert metrics["skipped"].dtype == np.float32
        assert (fault, float(metrics["skipped"]), int(state.step)) == (fault, 1, number)
        assert trained_bits(state) == before, fault
        rates.append(float(metrics["learning_rate"]))
    state, metrics = step(state, good_batch(2))
    assert float(metrics["skipped"]) == 0
    rates.append(float(metrics["learning_rate"]))
    # Updates are what the schedule counts: it waits for the refused ones.
    expected = [float(optimizer.schedule(n)) for n in (0, 1, 1, 1, 1, 1, 1)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    assert sum("jit(train_step)" in message for message in compilations()) == 1

    alone, _ = step(materialize(abstract), good_batch(1))
    assert trained_bits(alone) == before
    later = dataclasses.replace(alone, step=alone.step + 5)
    later, _ = step(later, good_batch(2))
    assert trained_bits(later) == trained_bits(state) != before


@pytest.mark.mesh
def test_groups_that_train_apart_refuse_apart():
    optimizer = decayed_adamw()
    case = Case("data=2,fsdp=2,tensor=2", counts=True)
    local = make_local_sgd(
        case.make_step(schedule=optimizer.schedule), LocalSGDConfig(inner_steps=100)
    )
    groups, _ = local(local.init(case.state(optimizer.transform)), good_batch(1))
    bad = good_batch(2)
    bad["x"][ROWS // 2 :] = np.nan

    def of_group(groups, index):
        own = jax.tree.map(lambda x: np.asarray(x)[index], groups.groups.params)
        return jax.tree.map(lambda x: x.tobytes(), own)

    before = [of_group(groups, 0), of_group(groups, 1)]
    alone, _ = local(jax.tree.map(jnp.copy, groups), good_batch(2))
    groups, metrics = local(groups, bad)
    assert group_means(metrics)["skipped"] == 0.5
    assert metrics["skipped"].value.tolist() == [0.0, 1.0]
    assert of_group(groups, 1) == before[1]
    assert of_group(groups, 0) == of_group(alone, 0) != before[0]
    counts = {int(x) for x in np.ravel(groups.groups.opt_state[0][0].count)}
    assert counts == {1, 2}
    groups, metrics = local(groups, good_batch(3))
    assert group_means(metrics)["skipped"] == 0
    expected = [float(optimizer.schedule(n)) for n in (2, 1)]
    np.testing.assert_allclose(metrics["learning_rate"].value, expected, rtol=1e-6)


def test_a_step_without_guards_applies_what_it_gets():
    case = CASES["one device"]
    state = case.state(optax.sgd(0.1), guards=None)
    for guards in (None, GuardsConfig(nonfinite="off")):
        step = case.make_step(guards)
        assert step.guards is None
        state, metrics = step(state, bad_batches()["nan in one gradient"])
        assert "skipped" not in metrics
    assert np.isnan(state.params["last"]["bias"]).any()


def trained(case, guards, spikes, left_out=(), steps=28):
    """Trains on fresh noise, some batches of which are a thousand times as large."""
    state, step = case.state(optax.adam(1e-3), guards, rate=0.0), case.make_step(guards)
    skipped = []
    for number in range(steps):
        if number in left_out:
            continue
        state, metrics = step(state, good_batch(number, 1e3 if number in spikes else 1.0))
        if float(metrics.get("skipped", 0)):
            skipped.append(number)
    return state, skipped


@pytest.mark.mesh
@pytest.mark.rest("soak")
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_spikes_are_left_out_of_a_training(metric):
    spike = dataclasses.replace(SPIKES.spike, metric=metric)
    guards = dataclasses.replace(SPIKES, spike=spike)
    case = Case("fsdp=8")

    def add(batch, size):
        # Spikes of the loss alone, where it is the loss that is watched.
        return {**batch, "add": np.full(ROWS, size, np.float32)} if metric == "loss" else batch

    state, step = case.state(optax.adam(1e-3), guards, rate=0.0), case.make_step(guards)
    expected, same = case.state(optax.adam(1e-3), guards, rate=0.0), case.make_step(guards)
    skipped = []
    for number in range(24):
        is_spike = number in (12, 13, 20)
        batch = good_batch(number, 1e3 if is_spike and metric == "grad_norm" else 1.0)
        state, metrics = step(state, add(batch, 100.0 if is_spike else 0.0))
        if float(metrics["skipped"]):
            skipped.append(number)
        if not is_spike:
            expected, _ = same(expected, batch)
    assert skipped == [12, 13, 20]
    # Without dropout the number of the step decides nothing: as if they had not been.
    assert trained_bits(state) == trained_bits(expected)
    assert int(state.spike_window.accepted) == 21


@pytest.mark.mesh
def test_spikes_are_the_same_on_every_mesh():
    spikes = {11, 17, 18}
    alone, expected = trained(CASES["one device"], SPIKES, spikes)
    assert expected == sorted(spikes)
    found, skipped = trained(CASES["three axes"], SPIKES, spikes)
    assert skipped == expected
    np.testing.assert_allclose(found.spike_window.values, alone.spike_window.values, rtol=1e-4)


@pytest.mark.mesh
def test_before_the_warmup_nothing_is_a_spike_but_what_is_not_finite_is_refused():
    case = CASES["one device"]
    state, skipped = trained(case, SPIKES, spikes={3, 6}, steps=8)
    assert skipped == []
    state, metrics = case.make_step(SPIKES)(state, bad_batches()["inf in one gradient"])
    assert float(metrics["skipped"]) == 1
    assert int(state.spike_window.accepted) == 8


def test_the_robust_score_is_that_of_numpy():
    random = np.random.default_rng(0)
    for count in (1, 2, 8, 15, 16):
        values = random.standard_normal(16).astype(np.float32) + 3
        used = values[:count]
        median = np.median(used)
        spread = 1.4826 * np.median(np.abs(used - median)) + 1e-4 * abs(median)
        found = robust_score(jnp.float32(7.0), jnp.asarray(values), jnp.int32(count))
        np.testing.assert_allclose(found, (7.0 - median) / spread, rtol=1e-4)


@pytest.mark.mesh
def test_a_resumed_window_goes_on_bit_for_bit(tmp_path):
    case = CASES["fsdp"]
    step = case.make_step(SPIKES)
    state, _ = trained(case, SPIKES, spikes={9}, steps=12)
    with RunCheckpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(12, state, {})
        checkpoints.wait()
        target = case.state(optax.adam(1e-3), SPIKES, rate=0.0)
        restored = checkpoints.restore(12, target)
    assert trained_bits(restored) == trained_bits(state)
    for number in (12, 13):
        restored, _ = step(restored, good_batch(number))
        state, _ = step(state, good_batch(number))
    assert trained_bits(restored) == trained_bits(state)


@pytest.mark.mesh
def test_a_state_without_the_window_of_its_step_is_refused():
    case = CASES["one device"]
    with pytest.raises(
        ModelError, match=r"(?s)the step looks for spikes among.*Give init_state and"
    ):
        case.make_step(SPIKES)(case.state(optax.sgd(0.1), None), good_batch())
    other = GuardsConfig(spike=SpikeConfig(window=32))
    local = make_local_sgd(case.make_step(other), LocalSGDConfig())
    with pytest.raises(
        ModelError, match=r"(?s)the step looks for spikes among.*Give init_state and"
    ):
        local(local.init(case.state(optax.sgd(0.1), SPIKES)), good_batch())
