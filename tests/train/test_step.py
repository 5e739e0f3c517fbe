"""The training step: one program, exact means, dtypes that stay, and clear refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import shardlib as sl
from shardlib.errors import ConfigError, DataError, ModelError, RuleError
from shardlib.losses import Mean

BATCH = {
    "x": np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32),
    "y": np.random.default_rng(1).standard_normal((16, 8), dtype=np.float32),
}


class Model(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.dense = nnx.Linear(
            4, 8, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs
        )
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.dropout(self.dense(x))


def mean_loss(model, batch, rng):
    error = jnp.square(model(batch["x"]) - batch["y"])
    return jnp.mean(error.astype(jnp.float32))


@pytest.fixture
def start():
    def make(optimizer=None, mesh="data=2,fsdp=2,tensor=2", **kwargs):
        with sl.use(sl.make_mesh(mesh), sl.rules.STANDARD):
            return sl.init_state(Model, optimizer or optax.adamw(1e-2), seed=0, **kwargs)

    return make


def test_the_second_step_compiles_nothing_and_donates_the_state(start, compilations):
    state = start()
    step = sl.make_train_step(mean_loss, schedule=optax.constant_schedule(1e-2))
    new, _ = step(state, BATCH)
    first = compilations()
    assert any("train_step" in message for message in first)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    for _ in range(3):
        new, metrics = step(new, BATCH)
    jax.block_until_ready(metrics)
    assert compilations() == first
    assert int(new.step) == 4
    assert set(metrics) == {"loss", "grad_norm", "learning_rate"}
    assert {x.dtype for x in metrics.values()} == {np.dtype("float32")}


def test_every_leaf_stays_where_it_was(start):
    state = start()
    placed = jax.tree.map(lambda x: x.sharding, state)
    new, _ = sl.make_train_step(mean_loss)(state, BATCH)
    assert jax.tree.map(lambda x: x.sharding, new) == placed
    assert new.params["dense"]["kernel"].sharding.spec == jax.P("fsdp", "tensor")


def test_equal_to_a_step_by_hand(start):
    def no_dropout(model, batch, rng):
        model.eval()
        return mean_loss(model, batch, rng)

    state = start(optax.sgd(0.1))
    kernel, bias = jax.device_get((state.params["dense"]["kernel"], state.params["dense"]["bias"]))
    new, metrics = sl.make_train_step(no_dropout)(state, BATCH)
    error = BATCH["x"] @ kernel + bias - BATCH["y"]
    grad = 2 * error / error.size
    # Sums of 16 products in float32.
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-6)
    expected = kernel - 0.1 * BATCH["x"].T @ grad
    np.testing.assert_allclose(new.params["dense"]["kernel"], expected, rtol=1e-5, atol=1e-6)
    norm = np.sqrt(np.sum((BATCH["x"].T @ grad) ** 2) + np.sum(grad.sum(0) ** 2))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def test_unequal_weights_are_exact_under_microbatches(start):
    weight = np.arange(16, dtype=np.float32)[:, None]

    def weighted(model, batch, rng):
        model.eval()
        error = jnp.square(model(batch["x"]) - batch["y"]) * batch["weight"]
        total = Mean(jnp.sum(error), 8 * jnp.sum(batch["weight"]))
        return total, {"rows": Mean(jnp.sum(batch["weight"]), jnp.float32(batch["x"].shape[0]))}

    results = {}
    for microbatches in (1, 2, 4):
        step = sl.make_train_step(weighted, microbatches=microbatches)
        state, metrics = step(start(optax.sgd(0.1)), {**BATCH, "weight": weight})
        results[microbatches] = jax.device_get((state.params, metrics))
    assert results[1][1]["rows"] == 7.5
    for microbatches in (2, 4):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            results[microbatches],
            results[1],
        )


def test_model_state_goes_through_every_microbatch(start):
    state = start()
    for _ in range(2):
        state, _ = sl.make_train_step(mean_loss, microbatches=4)(state, BATCH)
    assert int(state.model_state["calls"]) == 8


def test_dropout_is_new_in_each_step_and_equal_on_each_mesh(start):
    def mask(model, batch, rng):
        out = model(jnp.ones_like(batch["x"]))
        return mean_loss(model, batch, rng), {"kept": jnp.mean((out != 0).astype(jnp.float32))}

    kept = {}
    for mesh in ("data=8", "fsdp=4,tensor=2"):
        state, step = start(optax.sgd(0.0), mesh), sl.make_train_step(mask)
        values = []
        for _ in range(4):
            state, metrics = step(state, BATCH)
            values.append(float(metrics["kept"]))
        kept[mesh] = values
    assert kept["data=8"] == kept["fsdp=4,tensor=2"]
    assert len(set(kept["data=8"])) > 1


@pytest.mark.rest("mesh")
@pytest.mark.parametrize(
    ("policy", "stored"), [("f32", "float32"), ("bf16", "float32"), ("bf16_params", "bfloat16")]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_dtypes_stay_under_every_precision(start, compilations, policy, stored, microbatches):
    seen = []

    def loss(model, batch, rng):
        seen.append((model.dense.kernel.dtype, batch["x"].dtype))
        return mean_loss(model, batch, rng)

    state = start(precision=policy)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    assert state.params["dense"]["kernel"].dtype == stored
    step = sl.make_train_step(loss, precision=policy, microbatches=microbatches)
    state, _ = step(state, BATCH)
    before = compilations()
    state, metrics = step(state, BATCH)
    assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    assert compilations() == before
    computed = jnp.dtype("float32" if policy == "f32" else "bfloat16")
    assert set(seen) == {(computed, jnp.dtype("float32"))}
    assert float(metrics["loss"]) == pytest.approx(1.6, abs=0.6)


@pytest.mark.mesh
def test_bf16_follows_f32(start):
    losses = {}
    for policy in ("f32", "bf16"):
        state, step = start(precision=policy), sl.make_train_step(mean_loss, precision=policy)
        losses[policy] = []
        for _ in range(10):
            state, metrics = step(state, BATCH)
            losses[policy].append(float(metrics["loss"]))
    # bfloat16 keeps 8 bits; the loss averages 128 squared errors.
    np.testing.assert_allclose(losses["bf16"], losses["f32"], rtol=2**-6)


def test_evaluation_changes_nothing_and_adds_up_exactly(start):
    def loss(model, batch, rng):
        model.eval()
        error = jnp.square(model(batch["x"]) - batch["y"])
        return Mean(jnp.sum(error), jnp.float32(error.size))

    state = start()
    step = sl.make_eval_step(loss)
    parts = [{k: v[i : i + 4] for k, v in BATCH.items()} for i in range(0, 16, 4)]
    whole = sl.evaluate(step, state, [BATCH])
    assert type(whole["loss"]) is float
    assert sl.evaluate(step, state, parts)["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    with pytest.raises(DataError, match=r"no batches.*\n  Pass at least one; an iterator"):
        sl.evaluate(step, state, iter([]))
    assert int(state.step) == 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


@pytest.mark.mesh
def test_every_batch_shape_is_checked(start):
    step, state = sl.make_train_step(mean_loss, microbatches=2), start(mesh="data=2,fsdp=4")
    state, _ = step(state, BATCH)
    short = {name: value[:8] for name, value in BATCH.items()}
    with pytest.raises(RuleError, match=r"data\+fsdp\+expert=8 does not divide 4"):
        step(state, short)
    evaluate = sl.make_eval_step(mean_loss)
    evaluate(state, BATCH)
    assert set(evaluate(state, {**BATCH, "more": BATCH["x"]})) == {"loss"}
    with pytest.raises(RuleError, match="does not divide 6"):
        evaluate(state, {name: value[:6] for name, value in BATCH.items()})


@pytest.mark.parametrize("microbatches", [1, 2])
def test_model_state_keeps_its_dtype(compilations, microbatches):
    class Remembers(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(4, 8, rngs=rngs)
            self.last = nnx.Variable(jnp.asarray(0.0))

        def __call__(self, x):
            y = self.dense(x)
            self.last.set_value(jnp.mean(y))
            self.hidden = nnx.Intermediate(y)
            return y

    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
        state = sl.init_state(Remembers, optax.sgd(0.1))
    step = sl.make_train_step(mean_loss, precision="bf16", microbatches=microbatches)
    state, _ = step(state, BATCH)
    before = compilations()
    state, _ = step(state, BATCH)
    assert compilations() == before
    assert state.model_state["last"].dtype == jnp.float32
    assert set(state.model_state) == {"last"}


def test_axes_of_leaves_that_are_not_in_the_batch_are_refused(start):
    with pytest.raises(RuleError, match=r"(?s)batch_axes names 'images', but.*Name leaves of the"):
        sl.make_train_step(mean_loss, batch_axes={"images": ("batch", None)})(start(), BATCH)
    for make in (sl.make_train_step, sl.make_eval_step):
        for wrong in ("text", {"x": "batch"}):
            with pytest.raises(RuleError, match=r"expected a dict with a tuple.*\n  Write it as"):
                make(mean_loss, batch_axes=wrong)


def test_state_and_step_must_agree_on_precision(start):
    with pytest.raises(ModelError, match=r"(?s)the step's precision stores.*Give init_state and"):
        sl.make_train_step(mean_loss, precision="bf16_params")(start(), BATCH)


def test_a_linen_model_with_keyword_arguments():
    class Classifier(linen.Module):
        @linen.compact
        def __call__(self, x, *, train):
            return linen.Dropout(0.5, deterministic=not train)(linen.Dense(8)(x))

    def loss(model, batch, rng):
        return jnp.mean(jnp.square(model(batch["x"], train=True) - batch["y"]))

    with sl.use(sl.make_mesh("fsdp=8"), sl.rules.FSDP):
        inputs = {"x": jax.ShapeDtypeStruct((2, 4), jnp.float32), "train": False}
        state = sl.init_state(Classifier(), optax.sgd(0.1), inputs=inputs)
    state, metrics = sl.make_train_step(loss)(state, BATCH)
    assert np.isfinite(metrics["loss"])


def test_a_state_that_was_given_away(start):
    state, step = start(), sl.make_train_step(mean_loss)
    new, _ = step(state, BATCH)
    evaluate = sl.make_eval_step(mean_loss)
    for given in (step, evaluate):
        with pytest.raises(ModelError, match=r"was already passed to.*\n  Continue with the"):
            given(state, BATCH)
    whole = jax.jit(lambda state: evaluate(state, BATCH)["loss"].value)
    assert whole(new) == evaluate(new, BATCH)["loss"].value
    step(new, BATCH)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"microbatches": "auto"}, ModelError, "'auto' is not a positive .*fit_microbatches finds"),
        ({"reduction": "bf16"}, ModelError, r"'bf16', not .*Write it as ReductionConfig\(dtype="),
        ({"guards": "skip"}, ModelError, r"'skip', not .*Write it as GuardsConfig\(nonfinite="),
        ({"precision": 16}, ConfigError, "16. Did you mean 'bf16'.*Choose one of: f32, bf16"),
    ],
)
def test_options_of_a_wrong_kind(options, kind, text):
    with pytest.raises(kind, match=f"(?s){text}"):
        sl.make_train_step(mean_loss, **options)
