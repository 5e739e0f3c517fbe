"""Updates refused on the devices: what keeps its bits, what goes on, and what the program sends."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.checkpoint import CheckpointConfig, RunCheckpoints
from shardlib.checkpoint.tree import flatten
from shardlib.errors import ModelError
from shardlib.explain.program import collectives
from shardlib.losses import Mean
from shardlib.stack import scan_layers, stack_layers
from shardlib.train.gated import gated_update
from shardlib.train.guards import GuardsConfig, SpikeConfig
from shardlib.train.local_sgd import LocalSGDConfig, group_means, make_local_sgd
from shardlib.train.offload import offload_optimizer
from shardlib.train.optim import OptimizerConfig, build_optimizer
from shardlib.train.reduction import ReductionConfig
from shardlib.train.spikes import robust_score
from shardlib.train.state import abstract_state, materialize

ROWS, WIDTH, LAYERS = 16, 64, 4
GUARDS = GuardsConfig()


@jax.custom_vjp
def scale_gradient(x, factor):
    """`x`, whose gradient is multiplied by the mean of `factor`."""
    return x


scale_gradient.defvjp(
    lambda x, factor: (x, factor),
    lambda factor, g: (g * jnp.mean(factor).astype(g.dtype), jnp.zeros_like(factor)),
)


class Layer(nnx.Module):
    def __init__(self, rngs):
        kernel = jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH**0.5
        self.kernel = nnx.Param(kernel, out_sharding=("embed", "mlp"), eager_sharding=False)
        self.bias = nnx.Param(jnp.zeros(WIDTH), out_sharding=("norm",), eager_sharding=False)

    def __call__(self, x):
        x = sl.constrain(x, "batch", None) @ self.kernel[...]
        return jnp.tanh(sl.constrain(x, "batch", "mlp") + self.bias[...][None])


class Model(nnx.Module):
    """A scanned stack between two layers, with dropout; `counts` gives it a state of its own."""

    def __init__(self, rngs, counts=False, rate=0.25):
        self.layers = stack_layers(Layer, LAYERS, rngs)
        self.first, self.last = Layer(rngs), Layer(rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)
        self.counts = counts
        if counts:
            self.seen = nnx.BatchStat(jnp.zeros(WIDTH))

    def __call__(self, x, factor):
        self.last.bias.set_value(scale_gradient(self.last.bias[...], factor))
        x = scan_layers(lambda layer, x, _=None: (layer(x), None), self.layers, self.first(x))[0]
        if self.counts:
            mean = jnp.mean(x.astype(jnp.float32), axis=0)
            self.seen.set_value(0.9 * self.seen[...] + mean.astype(self.seen[...].dtype))
        return self.last(self.dropout(x))


def loss_fn(model, batch, rng):
    error = jnp.square(model(batch["x"], batch["factor"]) - batch["y"]).astype(jnp.float32)
    rows = jnp.sum(error, axis=1) + batch["add"].astype(jnp.float32)
    return Mean(jnp.sum(rows), jnp.float32(rows.size))


def good_batch(seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    x, y = (random.standard_normal((ROWS, WIDTH), dtype=np.float32) for _ in range(2))
    return {
        "x": x,
        "y": y * np.float32(scale),
        "add": np.zeros(ROWS, np.float32),
        "factor": np.ones(ROWS, np.float32),
    }


def bad_batches():
    """Faults by name: of the loss alone, of one gradient alone, and of the last rows alone."""
    faults = {
        "nan in the loss": {"add": np.full(ROWS, np.nan, np.float32)},
        "inf in the loss": {"add": np.full(ROWS, np.inf, np.float32)},
        "nan in one gradient": {"factor": np.full(ROWS, np.nan, np.float32)},
        "inf in one gradient": {"factor": np.full(ROWS, np.inf, np.float32)},
    }
    x = good_batch(5)["x"]
    x[-1] = np.nan
    return {
        name: {**good_batch(5), **change}
        for name, change in {**faults, "nan in one microbatch": {"x": x}}.items()
    }


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: str
    num_devices: int = 8
    rules: str = "standard"
    precision: str = "f32"
    counts: bool = False
    offloads: bool = False
    step: dict = dataclasses.field(default_factory=dict)

    def abstract(self, optimizer, guards=GUARDS, rate=0.25):
        abstract = abstract_state(
            lambda rngs: Model(rngs, self.counts, rate),
            optimizer,
            precision=self.precision,
            guards=guards,
            mesh=sl.make_mesh(self.mesh, devices=jax.devices()[: self.num_devices]),
            rules=sl.rules.preset(self.rules),
        )
        return offload_optimizer(abstract) if self.offloads else abstract

    def state(self, *args, **kwargs):
        return materialize(self.abstract(*args, **kwargs), seed=0)

    def make_step(self, guards=GUARDS, schedule=None):
        options = {"precision": self.precision, "schedule": schedule, "guards": guards}
        return sl.make_train_step(loss_fn, **options, **self.step)


CASES = {
    "one device": Case("data=1", 1, counts=True, step={"microbatches": 2}),
    "fsdp": Case("fsdp=8", counts=True),
    "three axes": Case("data=2,fsdp=2,tensor=2", counts=True, step={"microbatches": 2}),
    "pipeline": Case("data=2,stage=2,fsdp=2", step={"microbatches": 2}),
    "zero1": Case("fsdp=8", rules="zero1"),
    "zero2": Case("data=2,fsdp=4", rules="zero2"),
    "bf16 params": Case("fsdp=8", precision="bf16_params", counts=True),
    "reduced in bf16": Case("data=2,fsdp=4", step={"reduction": ReductionConfig(dtype="bf16")}),
    "offloaded": Case("fsdp=8", offloads=True),
}


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


@pytest.fixture
def compilations(caplog):
    """How often a training step was compiled so far."""
    caplog.set_level("WARNING", "jax")
    with jax.log_compiles():
        yield lambda: sum(
            "Finished XLA compilation of jit(train_step)" in r.message for r in caplog.records
        )


@pytest.mark.parametrize("name", CASES)
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
    assert compilations() == 1

    alone, _ = step(materialize(abstract), good_batch(1))
    assert trained_bits(alone) == before
    later = dataclasses.replace(alone, step=alone.step + 5)
    later, _ = step(later, good_batch(2))
    assert trained_bits(later) == trained_bits(state) != before


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


SPIKES = GuardsConfig(spike=SpikeConfig(metric="grad_norm", threshold=8.0, window=16, warmup=8))


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


@pytest.mark.parametrize("metric", ["grad_norm", "loss"])
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


def test_spikes_are_the_same_on_every_mesh():
    spikes = {11, 17, 18}
    alone, expected = trained(CASES["one device"], SPIKES, spikes)
    assert expected == sorted(spikes)
    for name in ("fsdp", "three axes"):
        found, skipped = trained(CASES[name], SPIKES, spikes)
        assert skipped == expected
        np.testing.assert_allclose(found.spike_window.values, alone.spike_window.values, rtol=1e-4)


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


def test_without_a_spike_policy_the_state_is_as_ever():
    case = CASES["fsdp"]
    plain, guarded = (case.state(optax.adam(1e-3), guards) for guards in (None, GUARDS))
    assert list(flatten(plain)) == list(flatten(guarded))
    watched = case.state(optax.adam(1e-3), SPIKES)
    extra = set(flatten(watched)) - set(flatten(plain))
    assert extra == {"spike_window/values", "spike_window/accepted"}
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(watched.spike_window))
    assert str(sl.explain(watched)) == str(sl.explain(plain))


def test_a_state_without_the_window_of_its_step_is_refused():
    case = CASES["one device"]
    with pytest.raises(ModelError) as error:
        case.make_step(SPIKES)(case.state(optax.sgd(0.1), None), good_batch())
    assert str(error.value) == (
        "the step looks for spikes among the latest 16 values, but the state keeps none.\n"
        "  Give init_state and make_train_step the same guards."
    )
    other = GuardsConfig(spike=SpikeConfig(window=32))
    local = make_local_sgd(case.make_step(other), LocalSGDConfig())
    with pytest.raises(ModelError) as error:
        local(local.init(case.state(optax.sgd(0.1), SPIKES)), good_batch())
    assert str(error.value) == (
        "the step looks for spikes among the latest 32 values, but the state keeps 16.\n"
        "  Give init_state and make_train_step the same guards."
    )


def test_guards_of_another_kind_are_refused():
    with pytest.raises(ModelError) as error:
        sl.make_train_step(loss_fn, guards="skip")  # type: ignore[arg-type]
    assert str(error.value) == (
        "guards is 'skip', not a GuardsConfig.\n  Write it as GuardsConfig(nonfinite='skip')."
    )


LOCAL = Case("data=2,fsdp=2,tensor=2", counts=True)


def program(case, state, guards):
    step = case.make_step(guards)
    if case is LOCAL:
        step = make_local_sgd(step, LocalSGDConfig(inner_steps=4))
        state = step.init(state)
    return step.lower(state, good_batch())


def sent(case, guards, *, clips):
    """What a step sends: its collectives, and the arrays that they carry by kind and axes."""
    clip = [optax.clip_by_global_norm(1.0)] if clips else []
    state = case.abstract(optax.chain(*clip, optax.adamw(1e-2)), guards)
    text = program(case, state, guards).compile().as_text()
    whole, arrays = collections.Counter(), collections.Counter()
    for c in collectives(text, state.definition.scope.mesh):
        whole[c.kind, c.mesh_axes, tuple(sorted(c.shapes)), c.count] += 1
        for shape in c.shapes:
            arrays[c.kind, c.mesh_axes, shape] += c.count
    return whole, arrays


@pytest.mark.parametrize("name", ["fsdp", "three axes", "pipeline", "zero1", "local sgd"])
def test_guards_send_nothing(name):
    case = CASES.get(name, LOCAL)
    assert sent(case, SPIKES, clips=True)[0] == sent(case, None, clips=True)[0]


def test_without_clipping_what_they_send_may_only_be_combined_otherwise():
    """Then it is the guards that make updates wait for the norm of all gradients, and XLA puts
    other arrays into one message."""
    case = CASES["fsdp"]
    assert sent(case, GUARDS, clips=False)[1] == sent(case, None, clips=False)[1]


@pytest.mark.parametrize("name", ["fsdp", "zero1", "offloaded"])
def test_guards_take_no_memory(name):
    case = CASES.get(name, LOCAL)

    def needed(guards):
        state = case.abstract(
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), guards
        )
        compiled = program(case, state, guards).compile().memory_analysis()
        return compiled.temp_size_in_bytes + compiled.output_size_in_bytes

    # A second copy of one moment would take 12 KiB; of a single kernel 2 KiB.
    before = needed(None)
    assert needed(GUARDS) <= before + 4096
    assert needed(SPIKES) <= before + 4096


def momentum_twice():
    """Hands out its state as its update, and the same count twice; one leaf never changes."""

    def init(params):
        return {"trace": params, "counts": (jnp.int32(0), jnp.int32(0)), "seed": jnp.int32(7)}

    def update(grads, state, params=None):
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, state["trace"], grads)
        count = state["counts"][0] + 1
        return trace, {"trace": trace, "counts": (count, count), "seed": state["seed"]}

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "optimizer",
    [momentum_twice(), optax.adamw(1e-2), optax.MultiSteps(optax.adam(1e-2), 2), optax.sgd(0.1)],
    ids=["odd", "adamw", "multi steps", "no state"],
)
def test_a_gated_update_is_the_update_or_nothing(optimizer):
    params, grads = {"w": jnp.arange(3.0), "b": jnp.ones(2)}, {"w": jnp.ones(3), "b": -jnp.ones(2)}
    state = optimizer.init(params)

    def update(*arguments):
        # optax mixes dtypes.
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(*arguments)

    gated = jax.jit(functools.partial(gated_update, update))
    for _ in range(2):
        expected = jax.jit(update)(grads, state, params)
        good = gated(jnp.bool_(True), grads, state, params)
        jax.tree.map(np.testing.assert_array_equal, good, expected)
        nan = jax.tree.map(lambda x: x * jnp.nan, grads)
        _, refused = gated(jnp.bool_(False), nan, state, params)
        jax.tree.map(np.testing.assert_array_equal, refused, state)
        state = expected[1]
